package lockkeeper

import (
	"container/heap"
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

// The watchdog of a client: one goroutine that keeps all its leases. It starts before a lock is asked for, and ends
// 10 s after the last one. It waits for nothing but the next date: renewals that are due together travel in one
// pipeline, each in a goroutine that reports back.

const (
	// longestSleep: timers stand still while the machine is suspended. So that a loss is told within a second after
	// it wakes up, no sleep is longer.
	longestSleep = second

	// mostInBatch: one pipeline must not keep the server from others: a thousand renewals take it a millisecond or two.
	mostInBatch = 1000

	// toldAfter so many failures the caller of Release hears that nobody answers; it goes on being tried. Two, since
	// the first may be a connection that broke long ago.
	toldAfter = 2
)

var (
	errClosed   = errors.New("the client was closed")
	errNoAnswer = unreachable("release", "no answer before the lock ended")
)

// entry is a lease as the watchdog knows it. It does not refer to the holder's handle, which may be collected.
type entry struct {
	client      *Client
	key, owner  string
	minReplicas int
	grantedAt   int64

	fence  atomic.Int64
	endsAt atomic.Int64 // read without asking the watchdog; 0 if it is lost or given up
	loss   context.Context
	lose   context.CancelCauseFunc

	regranting      sync.Mutex // one upgrade or downgrade at a time
	mayBecomeShared bool       // guarded by it: a downgrade that was left without an answer may arrive late

	// Guarded by the client's mutex.
	lease     lease
	at        int64 // when it wants attention
	index     int   // in the order; -1 if it wants none
	renewing  []renewing
	changing  chan struct{} // closed when the upgrade or downgrade that is under way has ended
	releasing bool          // the holder lets go: no upgrade or downgrade is asked for any more
	outcome   error         // of the release, as far as is known
	told      chan struct{} // closed when that may be told
	ended     chan struct{} // closed when nothing is left to do
}

// renewing is somebody who waits for a renewal: one that left before tells nothing new.
type renewing struct {
	since int64
	told  chan error
}

func (c *Client) newEntry(key, owner string, fence, at int64, s settings, l lease) *entry {
	e := &entry{client: c, key: key, owner: owner, minReplicas: s.minReplicas, grantedAt: at,
		lease: l, index: -1, outcome: errNoAnswer,
		told: make(chan struct{}), ended: make(chan struct{})}
	e.fence.Store(fence)
	e.endsAt.Store(l.endsAt)
	e.loss, e.lose = context.WithCancelCause(context.Background())
	return e
}

// enter starts the watchdog, if it does not run, and keeps it running until leave.
func (c *Client) enter() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errors.Join(ErrInvalid, errClosed)
	}
	c.users++
	if !c.running {
		c.running, c.ended = true, make(chan struct{})
		go c.run()
	}
	return nil
}

func (c *Client) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.users--
	c.usedAt = time.Now()
	if c.closed {
		c.wake()
	}
}

func (c *Client) wake() {
	select {
	case c.bell <- struct{}{}:
	default:
	}
}

func (c *Client) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		at := now()
		c.mu.Lock()
		batches := map[route]*batch{}
		for len(c.order) > 0 && c.order[0].at <= at {
			c.attend(heap.Pop(&c.order).(*entry), at, batches)
		}
		until := at + longestSleep
		if len(c.order) > 0 {
			until = min(until, c.order[0].at)
		}
		logs := c.logs
		c.logs = nil
		idleSince := time.Now().Add(-keep)
		if c.closed {
			idleSince, until = time.Now(), min(until, at+10*millisecond)
		}
		c.looksAt = until
		c.mu.Unlock()
		for _, log := range logs {
			log()
		}
		for route, batch := range batches {
			go c.send(route, batch, at)
		}
		if c.place.closeIdle(idleSince) && c.isOver(idleSince) {
			return
		}
		timer.Reset(time.Duration(max(0, until-now())) * time.Microsecond)
		select {
		case <-c.bell:
		case <-timer.C:
		}
	}
}

// isOver tells whether the watchdog may end, since nobody has needed it since then.
func (c *Client) isOver(since time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.users > 0 || len(c.entries) > 0 || len(c.logs) > 0 || !c.closed && c.usedAt.After(since) {
		return false
	}
	c.running = false
	close(c.ended)
	return true
}

// route is what commands must have in common to travel together.
type route struct {
	redirect
	minReplicas int
	giveUpAt    int64
	number      int // of a batch that is full
}

type batch struct {
	entries  []*entry
	commands []command
}

// attend does what is due for one lease. Called with the mutex, as all below that does not say otherwise.
func (c *Client) attend(e *entry, at int64, batches map[route]*batch) {
	for {
		switch next := e.lease.next(at); next.verb {
		case sleep:
			c.schedule(e, next.at)
			return
		case idle:
			delete(c.entries, e)
			return
		case end:
			c.finish(e)
			return
		case lose:
			c.tellLost(e, next.why)
		default:
			if next.verb == renew && !e.lease.isGivenUp() {
				e.endsAt.Store(e.lease.endsAt)
			}
			to, err := c.place.route(context.Background(), e.key, next.at)
			if err != nil {
				c.answered(e, at, failed, err)
				continue
			}
			command, minReplicas := e.command(next)
			r := route{redirect: to, minReplicas: minReplicas, giveUpAt: next.at}
			for batches[r] != nil && len(batches[r].entries) >= mostInBatch {
				r.number++
			}
			if batches[r] == nil {
				batches[r] = &batch{}
			}
			batches[r].entries = append(batches[r].entries, e)
			batches[r].commands = append(batches[r].commands, command)
		}
	}
}

// command is what an attempt sends. A release that no replica knows of ends by the ttl, which is harmless.
func (e *entry) command(next action) (command, int) {
	if next.verb == release {
		return releaseCommand(e.key, e.owner), 0
	}
	return renewCommand(e.key, e.owner, next.ttl), e.minReplicas
}

// send carries out a batch and reports. Called without the mutex.
func (c *Client) send(r route, b *batch, sentAt int64) {
	answers := make([]answer, len(b.entries))
	errs := make([]error, len(b.entries))
	replies, err := r.node.renew(r.asking, r.giveUpAt, r.minReplicas, b.commands...)
	for i := range b.entries {
		if errs[i] = err; err == nil {
			answers[i], errs[i] = readAnswer(replies[i].Val(), replies[i].Err())
		}
	}
	for i, e := range b.entries {
		if errs[i] != nil {
			c.place.failed(e.key, r.node, errs[i])
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	at := now()
	for i, e := range b.entries {
		if c.answered(e, sentAt, answers[i], errs[i]) {
			c.schedule(e, at)
		}
	}
	c.wake()
}

// answered reports how an attempt ended. False if nobody waits for it any more.
func (c *Client) answered(e *entry, sentAt int64, a answer, err error) bool {
	at := now()
	if !e.lease.answered(sentAt, a, at) {
		return false
	}
	if e.lease.isGivenUp() {
		e.outcome = e.released(a, err)
		if a == failed && e.lease.failures == toldAfter {
			c.log(func() { c.settings.logger.Warn("not released yet", "key", e.key, "owner", e.owner, "error", err) })
			e.tellReleased()
		}
		return true
	}
	if a == failed {
		left := time.Duration(e.lease.endsAt-at) * time.Microsecond
		c.log(func() {
			c.settings.logger.Warn("a renewal has failed", "key", e.key, "owner", e.owner, "left", left, "error", err)
		})
	}
	if a == yes || a == failed {
		if a == yes && e.lease.lost == "" {
			e.endsAt.Store(e.lease.endsAt)
		}
		// A no is told together with the loss.
		later := e.renewing[:0]
		for _, each := range e.renewing {
			if each.since <= sentAt {
				each.told <- err
			} else {
				later = append(later, each)
			}
		}
		if e.renewing = later; len(later) > 0 {
			e.lease.renewNow(at)
		}
	}
	return true
}

// released is how a release ended that was answered so. A refusal after a release that nobody answered is a yes.
func (e *entry) released(a answer, err error) error {
	var lost *LostError
	switch {
	case errors.As(context.Cause(e.loss), &lost) && lost.Why != MaxHold:
		return lost
	case a == failed:
		return err
	case a == yes || e.lease.releaseInDoubt:
		return nil
	}
	return &LostError{e.key, refusals[a]}
}

func (e *entry) tellReleased() {
	select {
	case <-e.told:
	default:
		close(e.told)
	}
}

func (c *Client) tellLost(e *entry, why Why) {
	c.log(func() { c.settings.logger.Error("the lock is lost", "key", e.key, "owner", e.owner, "why", whys[why]) })
	c.takeAway(e, why)
}

// takeAway: the holder hears that it is lost, if it has not yet.
func (c *Client) takeAway(e *entry, why Why) {
	if why != MaxHold {
		e.endsAt.Store(0)
	}
	e.lose(&LostError{e.key, why})
	c.tellRenewing(e, &LostError{e.key, why})
}

func (c *Client) tellRenewing(e *entry, err error) {
	for _, each := range e.renewing {
		each.told <- err
	}
	e.renewing = nil
}

// log has this said by the watchdog, outside of the mutex: a logger may take its time, or use locks itself.
func (c *Client) log(say func()) {
	c.logs = append(c.logs, say)
	c.wake()
}

// debug is log for what most programs do not want to hear: it does not wake the watchdog for nothing.
func (c *Client) debug(say func()) {
	if c.settings.logger.Enabled(context.Background(), slog.LevelDebug) {
		c.log(say)
	}
}

func (c *Client) schedule(e *entry, at int64) {
	c.entries[e] = struct{}{}
	e.at = at
	if e.index < 0 {
		heap.Push(&c.order, e)
	} else {
		heap.Fix(&c.order, e.index)
	}
	if at < c.looksAt {
		c.wake()
	}
}

// giveUp stops renewal and gives what is to be sent, which the caller sends at that time and reports.
func (c *Client) giveUp(e *entry, notBefore int64) (next action, sentAt int64) {
	at := now()
	if e.lease.lost == "" && at >= e.lease.endsAt {
		// Nobody has told it yet.
		c.tellLost(e, Expired)
	}
	e.lease.giveUp(notBefore, at)
	if e.lease.lost != "" && e.lease.lost != MaxHold {
		e.outcome = &LostError{e.key, e.lease.lost}
	}
	e.endsAt.Store(0)
	c.tellRenewing(e, ErrReleased)
	if e.index >= 0 {
		heap.Remove(&c.order, e.index)
	}
	c.entries[e] = struct{}{}
	next = e.lease.next(at)
	if next.verb == sleep && next.at == at+1 {
		at++
		next = e.lease.next(at)
	}
	if next.verb == end {
		c.finish(e)
	}
	return next, at
}

// giveUpInDoubt releases what may have been granted without our knowing.
func (c *Client) giveUpInDoubt(key, owner string, s settings) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := now()
	c.schedule(c.newEntry(key, owner, 0, at, s, inDoubt(s.terms, at)), at)
}

// finish: nothing is left to do for this one.
func (c *Client) finish(e *entry) {
	if e.index >= 0 {
		heap.Remove(&c.order, e.index)
	}
	delete(c.entries, e)
	c.usedAt = time.Now()
	e.tellReleased()
	select {
	case <-e.ended:
	default:
		close(e.ended)
	}
}

// order is a heap of those who want attention, by when.
type order []*entry

func (o order) Len() int           { return len(o) }
func (o order) Less(i, j int) bool { return o[i].at < o[j].at }

func (o order) Swap(i, j int) {
	o[i], o[j] = o[j], o[i]
	o[i].index, o[j].index = i, j
}

func (o *order) Push(x any) {
	e := x.(*entry)
	e.index = len(*o)
	*o = append(*o, e)
}

func (o *order) Pop() any {
	last := len(*o) - 1
	e := (*o)[last]
	e.index = -1
	(*o)[last] = nil
	*o = (*o)[:last]
	return e
}
