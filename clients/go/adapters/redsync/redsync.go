// Package redsync has the methods of github.com/go-redsync/redsync, for those who come from there: only the import and the
// argument of [New] change. What differs: a lock is renewed while it is held, and lost when it cannot be; who waits is served
// first come, first served, and does not poll; the value is an owner of ours, so options that make one are left out, as are
// those about several servers.
package redsync

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	lockkeeper "github.com/lockkeeper/lockkeeper/clients/go"
)

var (
	// ErrFailed: the lock could not be had in the time given.
	ErrFailed = errors.New("redsync: failed to acquire lock")
	// ErrExtendFailed: the lock is not held any longer.
	ErrExtendFailed = errors.New("redsync: failed to extend lock")
	// ErrLockAlreadyExpired: the lock had been lost before it was unlocked.
	ErrLockAlreadyExpired = errors.New("redsync: failed to unlock, lock was already expired")
)

// Redsync makes mutexes on one server.
type Redsync struct{ client *lockkeeper.Client }

// New makes mutexes where the client is configured for.
func New(client *lockkeeper.Client) *Redsync { return &Redsync{client} }

// Option changes a mutex.
type Option func(*Mutex)

// WithExpiry sets how long the lock outlives a holder that is gone, 8 s by default; a living one renews it.
func WithExpiry(expiry time.Duration) Option { return func(m *Mutex) { m.expiry = expiry } }

// WithTries and WithRetryDelay together bound how long Lock waits in the queue: tries times the delay.
func WithTries(tries int) Option { return func(m *Mutex) { m.tries = tries } }

// WithRetryDelay is half of WithTries.
func WithRetryDelay(delay time.Duration) Option { return func(m *Mutex) { m.delay = delay } }

// Mutex is a lock that is taken and given back, again and again. Its methods may be called from any goroutine.
type Mutex struct {
	client        *lockkeeper.Client
	name          string
	expiry, delay time.Duration
	tries         int

	mu   sync.Mutex
	lock *lockkeeper.Lock
}

// NewMutex makes a mutex on the key name.
func (r *Redsync) NewMutex(name string, options ...Option) *Mutex {
	// 32 tries of 50 to 250 ms are what redsync makes.
	m := &Mutex{client: r.client, name: name, expiry: 8 * time.Second, tries: 32, delay: 150 * time.Millisecond}
	for _, option := range options {
		option(m)
	}
	return m
}

// Name is the key.
func (m *Mutex) Name() string { return m.name }

// Value is the owner; empty if it was never locked.
func (m *Mutex) Value() string {
	if lock := m.current(); lock != nil {
		return lock.Owner()
	}
	return ""
}

// Until is when the lock ends unless it is renewed.
func (m *Mutex) Until() time.Time {
	if lock := m.current(); lock != nil {
		return time.Now().Add(lock.Remaining())
	}
	return time.Time{}
}

// Fence is what redsync has not: a number that grows with every grant.
func (m *Mutex) Fence() int64 {
	if lock := m.current(); lock != nil {
		return lock.Fence()
	}
	return 0
}

func (m *Mutex) current() *lockkeeper.Lock {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lock
}

// TryLock asks once.
func (m *Mutex) TryLock() error { return m.TryLockContext(context.Background()) }

// TryLockContext asks once.
func (m *Mutex) TryLockContext(ctx context.Context) error { return m.acquire(ctx, 0) }

// Lock waits.
func (m *Mutex) Lock() error { return m.LockContext(context.Background()) }

// LockContext waits.
func (m *Mutex) LockContext(ctx context.Context) error {
	return m.acquire(ctx, time.Duration(m.tries)*m.delay)
}

func (m *Mutex) acquire(ctx context.Context, wait time.Duration) error {
	lock, err := m.client.Acquire(ctx, m.name, lockkeeper.WithTTL(m.expiry), lockkeeper.WithWait(wait))
	if err != nil {
		return fmt.Errorf("%w: %w", ErrFailed, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lock = lock
	return nil
}

// Unlock gives the lock back, and tells whether it was held to the end.
func (m *Mutex) Unlock() (bool, error) { return m.UnlockContext(context.Background()) }

// UnlockContext gives the lock back, and tells whether it was held to the end.
func (m *Mutex) UnlockContext(ctx context.Context) (bool, error) {
	lock := m.current()
	if lock == nil || errors.Is(lock.Err(), lockkeeper.ErrReleased) {
		return false, ErrLockAlreadyExpired
	}
	if err := lock.Release(ctx); err != nil {
		return false, fmt.Errorf("%w: %w", ErrLockAlreadyExpired, err)
	}
	return true, nil
}

// Extend renews now; not needed, since it is renewed anyhow.
func (m *Mutex) Extend() (bool, error) { return m.ExtendContext(context.Background()) }

// ExtendContext renews now; not needed, since it is renewed anyhow.
func (m *Mutex) ExtendContext(ctx context.Context) (bool, error) {
	if lock := m.current(); lock == nil {
		return false, ErrExtendFailed
	} else if err := lock.Renew(ctx); err != nil {
		return false, fmt.Errorf("%w: %w", ErrExtendFailed, err)
	}
	return true, nil
}

// Valid asks the server whether the lock is held.
func (m *Mutex) Valid() (bool, error) { return m.ValidContext(context.Background()) }

// ValidContext asks the server whether the lock is held.
func (m *Mutex) ValidContext(ctx context.Context) (bool, error) {
	held, err := m.ExtendContext(ctx)
	if errors.Is(err, lockkeeper.ErrLost) || errors.Is(err, lockkeeper.ErrReleased) {
		return false, nil
	}
	return held, err
}
