package lockkeeper

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
)

// How a lock is asked for: one try, then a wait in the server's queue, and again from the start after whatever went
// wrong. As long as no request can arrive that is not expected any more, it is asked in the same name, so that a place
// in the queue is kept. A request that may still be on its way when its connection is given up is followed by a
// RELEASE, so whoever asks again needs another name: in the same one, the late pair would give the lock away.

const (
	// overtime is how long the server may take, after a wait is over, to say so before we say it ourselves. The rest of
	// the 100 ms in which a wait returns is for a busy machine.
	overtime = 60 * millisecond

	// The pause before a server that gave an error is asked again, doubled every time: a server that restarts needs
	// seconds, a proxy that cut a connection needs none.
	firstPause = 20 * millisecond
	lastPause  = 500 * millisecond

	// leastAttempt is for what a caller waits for: a new connection over TLS to another continent takes most of it.
	leastAttempt = second

	// warnEvery: whoever runs the program is reminded that a wait goes on although nobody answers it.
	warnEvery = 30 * second

	mostRedirects = 4
)

// acquisition is one lock that is being asked for.
type acquisition struct {
	client    *Client
	key       string
	settings  settings
	startedAt int64
	deadline  int64 // of the wait

	owner   string
	inDoubt bool     // the server may have granted something or queued us without our knowing
	doubted bool     // the same before the last question
	former  []string // those in whose names was asked before, until they are known to have nothing
}

func (c *Client) acquire(ctx context.Context, key string, s settings) (*Lock, error) {
	if s.invalid != nil {
		return nil, s.invalid
	}
	if err := c.enter(); err != nil {
		return nil, err
	}
	defer c.leave()
	a := &acquisition{client: c, key: key, settings: s, startedAt: now(), deadline: forever}
	if s.wait != forever {
		a.deadline = a.startedAt + counted(s.wait)
	}
	a.newOwner()
	// Whatever happens, also a panic of a logger, leaves nothing behind.
	defer func() {
		if a.inDoubt {
			a.former = append(a.former, a.owner)
		}
		for _, owner := range a.former {
			c.giveUpInDoubt(key, owner, s)
		}
	}()
	return a.run(ctx)
}

func (a *acquisition) newOwner() { a.owner = a.settings.label + ":" + uuid.NewString() }

func (a *acquisition) mayWait() bool { return a.deadline-now() >= millisecond }

// until is when one question is given up. One try may take its time; a wait that is over is over.
func (a *acquisition) until(at int64) int64 {
	if a.settings.wait == 0 {
		return min(at, a.startedAt+longestAttempt)
	}
	if a.deadline == forever {
		return at
	}
	return min(at, a.deadline+overtime)
}

func (a *acquisition) run(ctx context.Context) (*Lock, error) {
	pause, warnedAt := int64(firstPause), int64(0)
	var trouble error
	begun := a.startedAt
	for tries := 1; ; tries++ {
		lock, err := a.once(ctx, begun)
		switch {
		case lock != nil:
			return lock, nil
		case a.client.closing.Err() != nil:
			return nil, context.Cause(a.client.closing)
		case ctx.Err() != nil:
			return nil, a.cancelled(ctx, trouble)
		case err != nil && a.isFinal(ctx, err, tries):
			return nil, told(a.client.place.String(), err)
		case err == nil && !a.mayWait():
			return nil, fmt.Errorf("%w: %q", ErrBusy, a.key)
		case err != nil && a.settings.wait != 0 && now()-warnedAt >= warnEvery:
			warnedAt = now()
			a.client.settings.logger.Warn("waiting on, although the server cannot be asked",
				"key", a.key, "owner", a.owner, "error", err)
		}
		// Without an error the place was given up before its time, by CLIENT UNBLOCK or somebody who released in our
		// name; or the grant had lapsed.
		trouble = err
		if now()-begun > lastPause {
			pause = firstPause
		}
		timer := after(min(now()+pause, a.deadline))
		select {
		case <-ctx.Done():
		case <-a.client.closing.Done():
		case <-timer.C:
		}
		timer.Stop()
		if err != nil && a.settings.wait != 0 && !a.mayWait() {
			return nil, told(a.client.place.String(), err)
		}
		pause, begun = min(pause*2, lastPause), now()
	}
}

// isFinal tells whether an error is for the caller, or it is asked again.
func (a *acquisition) isFinal(ctx context.Context, err error, tries int) bool {
	var f *failure
	neverReached := errors.As(err, &f) && f.noServer
	_, hasEnd := ctx.Deadline()
	switch {
	case !isPassing(err):
		return true
	case a.settings.wait == 0:
		return tries == 2 || neverReached || has(err, "NOREPLICAS") || now() >= a.startedAt+longestAttempt
	case a.settings.wait != forever:
		return !a.mayWait()
	}
	// A wait without end on a wrong address would say nothing for ever.
	return neverReached && !hasEnd
}

func (a *acquisition) cancelled(ctx context.Context, trouble error) error {
	if trouble != nil {
		return fmt.Errorf("lockkeeper: waiting for %q: %w (%w)", a.key, ctx.Err(), trouble)
	}
	return fmt.Errorf("lockkeeper: waiting for %q: %w", a.key, ctx.Err())
}

// once asks, and waits in the queue if the lock is busy. Neither a lock nor an error: it is busy, or was.
func (a *acquisition) once(ctx context.Context, sentAt int64) (*Lock, error) {
	t := a.settings.terms
	// What was granted in a former name would keep us out.
	var commands []command
	for _, owner := range a.former {
		commands = append(commands, releaseCommand(a.key, owner))
	}
	replies, err := a.ask(ctx, sentAt+longestAttempt/2, append(commands, acquireCommand(a.key, a.owner, t.ttl, a.settings.limit))...)
	if err != nil {
		return nil, err
	}
	a.former = nil
	last := replies[len(replies)-1]
	fence, err := readFence(last.Val(), last.Err())
	if err != nil {
		return nil, a.refused(err)
	}
	a.inDoubt = false
	waited := false
	if fence == 0 && a.mayWait() {
		waited = true
		sentAt = now()
		if fence, err = a.wait(ctx); err != nil {
			return nil, err
		}
	}
	if fence == 0 {
		return nil, nil
	}
	// Whoever handed it over wrote it, which our connection could not ask the replicas about. And the lease of a grant
	// began at some moment after it was asked for: if that is long ago, what can be counted on starts with a renewal.
	at := now()
	if waited && a.settings.minReplicas > 0 || t.isStale(sentAt, at) {
		sentAt = at
		replies, err := a.ask(ctx, at+max(t.attempt(), leastAttempt), renewCommand(a.key, a.owner, t.ttl))
		if err != nil {
			return nil, err
		}
		answer, err := readAnswer(replies[0].Val(), replies[0].Err())
		if err != nil {
			return nil, a.refused(err)
		}
		if answer != yes {
			a.inDoubt = false
			return nil, nil
		}
		at = now()
	}
	return a.granted(fence, sentAt, at), nil
}

func (a *acquisition) ask(ctx context.Context, limit int64, commands ...command) ([]*redis.Cmd, error) {
	a.doubted, a.inDoubt = a.inDoubt, true
	undo := releaseCommand(a.key, a.owner)
	replies, err := a.client.ask(ctx, a.key, a.until(limit), a.settings.minReplicas, undo, commands...)
	if err != nil {
		return nil, a.doubt(err)
	}
	return replies, nil
}

// doubt: what a failure leaves in doubt, and in whose name it is asked next. One that is not silent was ended by the
// server: asking again in the same name keeps the place, or gives the fence again.
func (a *acquisition) doubt(err error) error {
	var f *failure
	switch {
	case !errors.As(err, &f):
		return a.refused(err)
	case f.unsent:
		a.inDoubt = a.doubted
	case f.silent:
		a.former = append(a.former, a.owner)
		a.newOwner()
		a.inDoubt = false
	}
	return err
}

// refused: a refused command changed nothing; but one that too few replicas acknowledged was not refused, it was
// carried out.
func (a *acquisition) refused(err error) error {
	if !has(err, "NOREPLICAS") {
		a.inDoubt = a.doubted
	}
	return err
}

// granted is nil if the client was closed meanwhile.
func (a *acquisition) granted(fence, sentAt, at int64) *Lock {
	c := a.client
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		a.inDoubt = true // so it is released
		return nil
	}
	e := c.newEntry(a.key, a.owner, fence, at, a.settings, granted(a.settings.terms, sentAt, at))
	c.schedule(e, e.lease.quietUntil())
	a.inDoubt = false
	c.debug(func() { c.settings.logger.Debug("acquired", "key", e.key, "owner", e.owner, "fence", fence) })
	return newLock(e)
}

// wait waits in the queue, and meanwhile asks over another connection whether the server is still there, still the
// master, and knows of the wait. It goes on alone when it is given up.
func (a *acquisition) wait(parent context.Context) (fence int64, err error) {
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	closing := a.client.closing
	defer context.AfterFunc(closing, func() { cancel(context.Cause(closing)) })()
	t, limit, until := a.settings.terms, int64(maxTTL), int64(forever)
	if a.deadline != forever {
		limit, until = a.deadline-now(), a.deadline+overtime
	}
	soon := min(until, now()+longestAttempt)
	to, err := a.client.place.route(ctx, a.key, soon)
	if err != nil {
		return 0, err
	}
	c, err := to.node.connect(ctx, soon)
	if err != nil {
		return 0, err
	}
	commands := []command{waitCommand(a.key, a.owner, t.ttl, limit, a.settings.limit)}
	if to.asking {
		commands = append([]command{{"ASKING"}}, commands...)
	}
	every := min(t.ttl/3, longestAttempt)
	watched := make(chan struct{})
	// No goroutine for a wait that is over before it would look.
	first := time.AfterFunc(time.Duration(every)*time.Microsecond, func() {
		defer close(watched)
		for ctx.Err() == nil {
			if err := a.probe(ctx, to.node, max(every, second)); err != nil {
				cancel(err)
			}
			select {
			case <-ctx.Done():
			case <-time.After(time.Duration(every) * time.Microsecond):
			}
		}
	})
	defer func() {
		cancel(nil)
		if !first.Stop() {
			<-watched
		}
	}()
	a.doubted, a.inDoubt = false, true
	replies, err := to.node.askOn(ctx, c, until, releaseCommand(a.key, a.owner), commands...)
	if err != nil {
		a.client.place.failed(a.key, to.node, err)
		if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, errGranted) && parent.Err() == nil {
			err = &failure{error: cause, silent: true}
		}
		return 0, a.doubt(err)
	}
	last := replies[len(replies)-1]
	fence, err = readFence(last.Val(), last.Err())
	if err != nil {
		a.client.place.failed(a.key, to.node, err)
		return 0, a.refused(err)
	}
	a.inDoubt = fence != 0
	return fence, nil
}

// errGranted ends a wait whose grant went unheard: it has arrived, so no RELEASE follows it, and the same owner asks again.
var errGranted = errors.New("lockkeeper: it is granted")

// probe gives an error if the wait leads nowhere. Behind the same address there may be another server by now.
func (a *acquisition) probe(ctx context.Context, node *node, limit int64) error {
	c := a.client
	command := infoCommand(a.key)
	infoRefused := c.place.infoRefused.Load()
	if infoRefused {
		// A renewal of what is not held yet changes nothing, and is what a user may do who may not look.
		command = renewCommand(a.key, a.owner, a.settings.terms.ttl)
	}
	replies, err := c.ask(ctx, a.key, now()+limit, 0, nil, command)
	if err != nil {
		return err
	}
	if infoRefused {
		answer, err := readAnswer(replies[0].Val(), replies[0].Err())
		if answer == yes {
			return errGranted
		}
		return err
	}
	info, err := readInfo(replies[0].Val(), replies[0].Err())
	if has(err, "NOPERM") {
		c.place.infoRefused.Store(true)
		return nil
	}
	if err != nil {
		return err
	}
	to, err := c.place.route(ctx, a.key, now()+limit)
	if err != nil {
		return err
	}
	if info.isHeldBy(a.owner) && to.node == node {
		return errGranted
	}
	if !info.knows(a.owner) || to.node != node {
		return unreachable(node.String(), "who answers for it knows nothing of the wait")
	}
	return nil
}

// ask puts a question about a key, wherever that is. Error replies are no error here.
func (c *Client) ask(
	ctx context.Context, key string, until int64, minReplicas int, undo command, commands ...command,
) (replies []*redis.Cmd, err error) {
	for range mostRedirects {
		to, err := c.place.route(ctx, key, until)
		if err != nil {
			return nil, err
		}
		if replies, err = to.node.askInTurn(ctx, to.asking, until, minReplicas, undo, commands...); err != nil {
			c.place.failed(key, to.node, err)
			return nil, err
		}
		redirected := false
		for _, reply := range replies {
			if _, ok := refusal(reply.Err()); ok {
				redirected = c.place.failed(key, to.node, reply.Err()) || redirected
			}
		}
		if !redirected {
			break
		}
	}
	return replies, err
}

// told is an error as the caller hears it.
func told(server string, err error) error {
	var f *failure
	if errors.As(err, &f) {
		return told(server, f.error)
	}
	if _, ok := refusal(err); ok {
		return refusedBy(server, err)
	}
	return err
}
