// Package lockkeeper holds distributed locks on a Redis or Valkey server with the module Lockkeeper, by way of go-redis.
//
//	client, err := lockkeeper.New(rdb)
//	…
//	err = client.Do(ctx, "report", func(ctx context.Context, lock *lockkeeper.Lock) error {
//		return makeReport(ctx, lock.Fence())
//	})
//
// A lock that is held is renewed in the background, by one goroutine for each client, which starts with the first lock
// and ends 10 s after the last. When a lock is lost, [Lock.Lost] and the contexts made by [Lock.Context] tell, before
// another can hold it. [Lock.Remaining] and [Lock.Err] look at the clock and ask nobody, and are right even if the
// goroutine could not run: call one of them before what must not go wrong, and give [Lock.Fence] to what is written to.
//
// All talking is done on connections of our own, made from the settings of the user's client, but without its time-outs,
// retries and hooks.
package lockkeeper

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Client asks for locks where a go-redis client is configured for. It may be used from any goroutine, needs no closing,
// and costs nothing while it is not in use.
type Client struct {
	place    *place
	settings settings
	closing  context.Context // ends when it is closed
	close    context.CancelCauseFunc
	bell     chan struct{} // wakes the watchdog

	mu      sync.Mutex
	entries map[*entry]struct{} // all that have not ended
	order   order
	logs    []func()
	users   int // questions under way
	usedAt  time.Time
	looksAt int64 // when the watchdog looks next
	running bool
	closed  bool
	ended   chan struct{} // closed when the watchdog has ended
}

// New makes a client from one of go-redis: a [*redis.Client], standalone or by Sentinel, over TCP, TLS or a unix socket, or
// a [*redis.ClusterClient]. Any other is refused with [ErrInvalid], as a Ring is: its shards would not agree. It connects
// to nothing. The options are those of all locks that do not say otherwise.
func New(client redis.UniversalClient, options ...Option) (*Client, error) {
	s := defaults().with(options)
	if s.invalid != nil {
		return nil, s.invalid
	}
	place, err := newPlace(client, s.label)
	if err != nil {
		return nil, err
	}
	c := &Client{place: place, settings: s, entries: map[*entry]struct{}{}, bell: make(chan struct{}, 1)}
	c.closing, c.close = context.WithCancelCause(context.Background())
	return c, nil
}

// Acquire waits for the lock in the server's queue, first come, first served, until ctx ends, or for as long as [WithWait]
// says: then the error is [ErrBusy]. While the server cannot be reached it is asked again; a wait that nothing bounds
// fails at once if the server was never there.
//
// When ctx ends, it returns at once and leaves neither a lock nor a place in the queue behind, or, while the server
// cannot be reached, none that outlives one ttl.
func (c *Client) Acquire(ctx context.Context, key string, options ...Option) (*Lock, error) {
	return c.acquire(ctx, key, c.settings.with(options))
}

// TryAcquire asks once and does not wait: the error is [ErrBusy] if another holds the lock or waits for it. It returns
// within 5 s.
func (c *Client) TryAcquire(ctx context.Context, key string, options ...Option) (*Lock, error) {
	s := c.settings.with(options)
	s.wait = 0
	return c.acquire(ctx, key, s)
}

// Do acquires the lock as [Client.Acquire] does, runs body under it, and releases it, also if body panics. The context that
// body gets is cancelled when the lock is lost, with [ErrLost] as its cause. The error is that of body joined with that
// of the release, if that says more, in this order; body's stays visible for [errors.Is] and [errors.As].
func (c *Client) Do(
	ctx context.Context, key string, body func(ctx context.Context, lock *Lock) error, options ...Option,
) (err error) {
	lock, err := c.Acquire(ctx, key, options...)
	if err != nil {
		return err
	}
	defer func() {
		// Not by a context that may have ended.
		released := lock.Release(context.WithoutCancel(ctx))
		if released != nil && !errors.Is(err, released) { // body may have said already that it is lost
			err = errors.Join(err, released)
		}
	}()
	inner, cancel := lock.Context(ctx)
	defer cancel()
	return body(inner, lock)
}

// Info tells who holds the lock and who waits for it; nil if nobody does either.
func (c *Client) Info(ctx context.Context, key string) (*Info, error) {
	reply, err := c.question(ctx, key, infoCommand(key))
	if err != nil {
		return nil, err
	}
	info, err := readInfo(reply.Val(), reply.Err())
	return info, told(c.place.String(), err)
}

// ReleaseFor releases the lock in the name of owner, whoever that is, and gives up that owner's place in the queue. Harms
// nobody else: if it does not hold the lock, the error is [ErrLost].
func (c *Client) ReleaseFor(ctx context.Context, key, owner string) error {
	reply, err := c.question(ctx, key, releaseCommand(key, owner))
	if err != nil {
		return err
	}
	answer, err := readAnswer(reply.Val(), reply.Err())
	if why, ok := refusals[answer]; ok {
		return &LostError{key, why}
	}
	return told(c.place.String(), err)
}

func (c *Client) question(ctx context.Context, key string, question command) (*redis.Cmd, error) {
	if err := c.enter(); err != nil {
		return nil, err
	}
	defer c.leave()
	replies, err := c.ask(ctx, key, now()+longestAttempt, 0, nil, question)
	if err != nil {
		return nil, told(c.place.String(), err)
	}
	return replies[0], nil
}

// Settled waits until all that was given up before has been released or has ended by itself, or ctx ends.
func (c *Client) Settled(ctx context.Context) error {
	c.mu.Lock()
	var givenUp []*entry
	for e := range c.entries {
		if e.lease.isGivenUp() {
			givenUp = append(givenUp, e)
		}
	}
	c.mu.Unlock()
	for _, e := range givenUp {
		select {
		case <-e.ended:
		case <-ctx.Done():
			return fmt.Errorf("lockkeeper: not all is released: %w", ctx.Err())
		}
	}
	return nil
}

// Close gives back all that is held, to whose holders it is lost with [Gone] before it is released, ends all waits,
// closes the connections, and waits for that until ctx ends: what is left then ends by its ttl. A program that just ends
// leaves its locks to their ttl; one that calls this last does not.
func (c *Client) Close(ctx context.Context) error {
	c.close(errors.Join(ErrInvalid, errClosed))
	c.mu.Lock()
	c.closed = true
	for e := range c.entries {
		if !e.lease.isGivenUp() {
			c.takeAway(e, Gone)
			e.lease.giveUp(0, now())
			c.schedule(e, now())
		}
	}
	running, ended := c.running, c.ended
	c.mu.Unlock()
	c.wake()
	if !running {
		return nil
	}
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("lockkeeper: not all is released: %w", ctx.Err())
	}
}
