package lockkeeper

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"
)

// How a lock that is held becomes an exclusive or a shared one: its owner asks again, with another limit, and is granted
// anew in place of what it has, at once or not at all. Right before that it renews: an owner whose lease had gone would be
// granted the lock as well, and would believe that nobody was in between.

// Upgrade makes this the only holder, as a reader becomes who needs to write. Its fence is a new one then. If others
// hold the lock as well the error is [ErrBusy], at once: two readers who both waited for that would wait for each other. As
// after every error but [ErrLost], the lock is held on as it was.
//
// It returns within 5 s: [ErrUnreachable] means that nobody answered, so count on no more than before. The context bounds
// only for how long the caller waits; what was begun goes on, and tells by [Lock.Fence]. No upgrade follows a
// [Lock.Downgrade] that was left without an answer: release the lock, and acquire it anew.
func (l *Lock) Upgrade(ctx context.Context) error { return l.regrant(ctx, exclusive) }

// Downgrade makes this a [Shared] lock, as a writer becomes who only reads on. Its fence is a new one then, and readers
// who wait are let in.
//
// It returns within 5 s: [ErrUnreachable] means that nobody answered, so count on no more than a shared lock. The context
// bounds only for how long the caller waits.
func (l *Lock) Downgrade(ctx context.Context) error { return l.regrant(ctx, shared) }

func (l *Lock) regrant(ctx context.Context, limit int) error {
	e, c := l.e, l.e.client
	if err := l.Err(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("lockkeeper: asking for %q anew: %w", e.key, err)
	}
	if err := c.enter(); err != nil {
		return err
	}
	answer := make(chan error, 1)
	go func() {
		defer c.leave()
		answer <- l.regrantInTime(limit)
	}()
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return fmt.Errorf("lockkeeper: asking for %q anew: %w", e.key, ctx.Err())
	}
}

func (l *Lock) regrantInTime(limit int) error {
	defer runtime.KeepAlive(l)
	e, c := l.e, l.e.client
	e.regranting.Lock()
	defer e.regranting.Unlock()
	changed := make(chan struct{})
	defer close(changed)
	c.mu.Lock()
	e.changing = changed
	c.mu.Unlock()
	if limit == exclusive && e.mayBecomeShared {
		return unreachable(c.place.String(), "a downgrade that was not answered may still arrive: release the lock, and acquire it anew")
	}
	until, pause := now()+longestAttempt, int64(firstPause)
	ctx, cancel := context.WithTimeout(e.loss, longestAttempt*time.Microsecond)
	defer cancel()
	for {
		if e.isReleasing() {
			return ErrReleased
		}
		err := l.regrantOnce(ctx, limit, until)
		lost := l.Err()
		switch {
		case lost != nil:
			return lost
		case err == nil, errors.Is(err, ErrBusy):
			return err
		case ctx.Err() != nil:
			return unreachable(c.place.String(), "no answer in time")
		case !isPassing(err) || now()+pause >= until:
			return err
		}
		timer := after(now() + pause)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
		pause = min(pause*2, lastPause)
	}
}

// regrantOnce asks in the same words as the time before, so what was granted unheard is told again.
func (l *Lock) regrantOnce(ctx context.Context, limit int, until int64) error {
	e, c := l.e, l.e.client
	if err := l.renew(ctx, l.extension()); err != nil {
		return err
	}
	asked := acquireCommand(e.key, e.owner, e.lease.terms.ttl, limit)
	replies, err := c.ask(ctx, e.key, min(until, now()+longestAttempt/2), e.minReplicas, nil, asked)
	fence := int64(0)
	if err == nil {
		fence, err = readFence(replies[0].Val(), replies[0].Err())
	}
	var f *failure
	silent := errors.As(err, &f) && f.silent
	if limit == shared && silent {
		e.mayBecomeShared = true
	}
	if err == nil && fence == 0 {
		if limit == shared {
			return unreachable(c.place.String(), "it says that the lock is another's") // and will tell so at a renewal
		}
		return fmt.Errorf("%w: %q", ErrBusy, e.key)
	}
	if c.regranted(e, fence, silent) {
		// By now it is lost or released, and the grant may have come after that: it is nobody's.
		c.giveUpInDoubt(e.key, e.owner, settings{terms: e.lease.terms})
	}
	return told(c.place.String(), err)
}

// extension is the ttl with which a renewal leaves an extended lease as long as it is; 0 if the agreed one does.
func (l *Lock) extension() int64 {
	e, c := l.e, l.e.client
	c.mu.Lock()
	defer c.mu.Unlock()
	terms := e.lease.terms
	left := e.lease.endsAt + terms.margin() - now()
	if left <= counted(terms.ttl) || e.lease.extension != 0 {
		return 0
	}
	return left
}

func (e *entry) isReleasing() bool {
	e.client.mu.Lock()
	defer e.client.mu.Unlock()
	return e.releasing
}

// changeWait bounds for how long a release waits for an upgrade or downgrade that is under way.
const changeWait = 500 * millisecond

// endChange waits for the answer of the upgrade or downgrade that is under way, and lets none follow: overtaken by the
// release, it would be granted the lock anew, until that is answered and released as well.
func (l *Lock) endChange(ctx context.Context) {
	e, c := l.e, l.e.client
	c.mu.Lock()
	e.releasing = true
	changing := e.changing
	c.mu.Unlock()
	if changing == nil {
		return
	}
	timeout := after(now() + changeWait)
	defer timeout.Stop()
	select {
	case <-changing:
	case <-ctx.Done():
	case <-timeout.C:
	}
}

// regranted notes the fence, if one is known, and tells whether the lease has ended meanwhile, or ends now and the grant
// may come after that.
func (c *Client) regranted(e *entry, fence int64, silent bool) (over bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ended := e.lease.isGivenUp() || e.lease.lost != "" && e.lease.lost != MaxHold || now() >= e.lease.endsAt
	if ended || e.releasing && silent {
		// Of the two releases that are under way now, the first to arrive is told yes.
		e.lease.releaseInDoubt = true
		return true
	}
	if fence != 0 {
		e.fence.Store(fence)
		c.debug(func() { c.settings.logger.Debug("acquired", "key", e.key, "owner", e.owner, "fence", fence) })
	}
	return false
}
