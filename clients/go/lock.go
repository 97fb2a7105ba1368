package lockkeeper

import (
	"context"
	"fmt"
	"runtime"
	"time"
)

// Lock is a lock that is held, and renewed by the watchdog until it is given up. Its methods may be called from any
// goroutine.
//
// A handle that is forgotten is released when it is collected, some time, with a warning in the log: that is a net, not
// a way to release.
type Lock struct {
	e       *entry
	cleanup runtime.Cleanup
}

func newLock(e *entry) *Lock {
	l := &Lock{e: e}
	l.cleanup = runtime.AddCleanup(l, (*entry).forgotten, e)
	return l
}

func (e *entry) forgotten() {
	c := e.client
	c.mu.Lock()
	defer c.mu.Unlock()
	if e.lease.isGivenUp() || e.lease.lost == Taken || e.lease.lost == Gone || !c.running {
		return
	}
	c.log(func() { c.settings.logger.Warn("a lock was forgotten", "key", e.key, "owner", e.owner) })
	e.lease.giveUp(0, now())
	c.schedule(e, now())
}

// Key is the key of the lock.
func (l *Lock) Key() string { return l.e.key }

// Owner is the name under which this handle holds the lock, `<label>:<uuid>`: no other ever has it.
func (l *Lock) Owner() string { return l.e.owner }

// Fence grows with every grant of this key. A storage that refuses a smaller one than it has seen is safe even from a
// holder that was paused past its ttl. [Lock.Upgrade] and [Lock.Downgrade] are grants, too.
//
// Of several holders all fences are good: a storage remembers the highest that came with an exclusive lock, and refuses
// everybody below that.
func (l *Lock) Fence() int64 { return l.e.fence.Load() }

// Remaining is for how long, from now, nobody else can hold the lock; zero if it is lost or given up. Computed from a
// clock that runs through suspend, without asking anybody, and on the safe side: counted from before the last
// acknowledged request was sent, less 1 % and 2 ms.
func (l *Lock) Remaining() time.Duration {
	return time.Duration(max(0, l.e.endsAt.Load()-now())) * time.Microsecond
}

// Err is nil as long as the lock is held, then a [*LostError] or [ErrReleased]. It believes the clock before the
// watchdog, so it is right even if the program was stopped and has just gone on: ask it before what must not go wrong.
func (l *Lock) Err() error {
	e := l.e
	e.client.mu.Lock()
	defer e.client.mu.Unlock()
	switch {
	case e.loss.Err() != nil:
		return context.Cause(e.loss)
	case e.lease.lost != "":
		return &LostError{e.key, e.lease.lost}
	case e.lease.isGivenUp():
		return ErrReleased
	case now() >= e.lease.endsAt:
		return &LostError{e.key, Expired}
	}
	return nil
}

// Lost is closed when the lock is lost; [Lock.Err] says why. A loss by silence is told before the server can give the
// lock to another; a deletion or a takeover by force is learnt at the next renewal. It is not closed when the
// lock is released.
func (l *Lock) Lost() <-chan struct{} { return l.e.loss.Done() }

// Context gives a context that is cancelled when the lock is lost, with an [ErrLost] as its [context.Cause].
func (l *Lock) Context(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	loss := l.e.loss // which does not keep the handle
	stop := context.AfterFunc(loss, func() { cancel(context.Cause(loss)) })
	return ctx, func() {
		stop()
		cancel(nil)
		runtime.KeepAlive(l)
	}
}

// Renew asks the server now whether we still hold it, and renews. [ErrLost] is final; any other error is no loss, since
// the watchdog goes on trying until the lease ends.
func (l *Lock) Renew(ctx context.Context) error { return l.renew(ctx, 0) }

// Extend makes the lease last for ttl from now, this once, for a time in which nobody can renew: the machine is about to
// be suspended, or the network to be changed. The watchdog goes on with the ttl that was agreed when that is what
// remains.
func (l *Lock) Extend(ctx context.Context, ttl time.Duration) error {
	if s := (settings{}).with([]Option{WithTTL(ttl)}); s.invalid != nil {
		return s.invalid
	}
	return l.renew(ctx, ttl.Milliseconds()*millisecond)
}

func (l *Lock) renew(ctx context.Context, ttl int64) error {
	defer runtime.KeepAlive(l)
	if err := l.Err(); err != nil {
		return err
	}
	e, c := l.e, l.e.client
	answer := make(chan error, 1)
	c.mu.Lock()
	if e.lease.isGivenUp() || e.lease.lost != "" {
		c.mu.Unlock()
		return l.Err()
	}
	at := now()
	e.renewing = append(e.renewing, renewing{at, answer})
	if ttl != 0 {
		e.lease.extend(ttl, at)
	} else {
		e.lease.renewNow(at)
	}
	c.schedule(e, at)
	c.mu.Unlock()
	select {
	case err := <-answer:
		return told(c.place.String(), err)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Release gives the lock back, and tells whether it was held to the end: nil, or [ErrLost] if it had been lost before.
// Renewal stops first.
//
// It returns within 5 s: [ErrUnreachable] means that nobody answered. The context bounds only for how long the caller
// waits: what could not be told in time is tried on in the background, until the lock has ended by itself. A second
// Release tells the same, so it can be deferred as well.
func (l *Lock) Release(ctx context.Context) error { return l.ReleaseAfter(ctx, 0) }

// ReleaseAfter is as [Lock.Release], but the lock stays taken until so long after it was granted. It does not wait: what
// is left becomes the lock's ttl on the server. For a job that runs at the same minute on several machines and is done
// sooner than their clocks differ.
func (l *Lock) ReleaseAfter(ctx context.Context, hold time.Duration) error {
	defer runtime.KeepAlive(l)
	e, c := l.e, l.e.client
	l.cleanup.Stop()
	c.mu.Lock()
	first := !e.lease.isGivenUp()
	c.mu.Unlock()
	until := now() + longestAttempt
	if first {
		l.endChange(ctx)
		l.giveUp(ctx, hold, until)
	}
	select {
	case <-e.told: // even if the context has ended meanwhile
	default:
		timeout := after(until)
		defer timeout.Stop()
		select {
		case <-e.told:
		case <-ctx.Done():
			return fmt.Errorf("lockkeeper: releasing %q in the background: %w", e.key, ctx.Err())
		case <-timeout.C:
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return told(c.place.String(), e.outcome)
}

func (l *Lock) giveUp(ctx context.Context, hold time.Duration, until int64) {
	e, c := l.e, l.e.client
	entered := c.enter() == nil
	c.mu.Lock()
	next, sentAt := action{verb: end}, int64(0)
	if !e.lease.isGivenUp() {
		next, sentAt = c.giveUp(e, e.grantedAt+hold.Microseconds())
	}
	if !entered {
		c.finish(e) // a closed client has released it, unless it was lost before
	}
	c.mu.Unlock()
	next.at = min(next.at, until) // the wait for a change has taken some of it
	switch {
	case !entered:
	case next.verb == end:
		c.leave()
	case ctx.Err() != nil:
		go c.release(context.WithoutCancel(ctx), e, next, sentAt)
	default:
		c.release(ctx, e, next, sentAt)
	}
}

// release carries out the first attempt; the watchdog tries on if it fails.
func (c *Client) release(ctx context.Context, e *entry, next action, sentAt int64) {
	defer c.leave()
	command, minReplicas := e.command(next)
	var a answer
	replies, err := c.ask(ctx, e.key, next.at, minReplicas, command, command)
	if err == nil {
		a, err = readAnswer(replies[0].Val(), replies[0].Err())
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.answered(e, sentAt, a, err)
	if e.lease.state == ended {
		c.debug(func() { c.settings.logger.Debug("released", "key", e.key, "owner", e.owner, "outcome", e.outcome) })
		c.finish(e)
		return
	}
	c.schedule(e, now())
}

// Leave stops renewing and lets the lock lapse by itself, a ttl from the last renewal at most.
func (l *Lock) Leave() {
	e, c := l.e, l.e.client
	l.cleanup.Stop()
	c.mu.Lock()
	defer c.mu.Unlock()
	if e.lease.isGivenUp() {
		return
	}
	e.lease.giveUp(0, now())
	e.lease.state = ended
	e.outcome = nil
	e.endsAt.Store(0)
	c.tellRenewing(e, ErrReleased)
	c.finish(e)
}

// String shows key, owner and fence.
func (l *Lock) String() string {
	return fmt.Sprintf("%q held by %s with fence %d for %v", l.e.key, l.e.owner, l.Fence(), l.Remaining())
}
