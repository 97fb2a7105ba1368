// Package gocron lets only one of many schedulers of github.com/go-co-op/gocron run a job.
package gocron

import (
	"context"
	"time"

	"github.com/go-co-op/gocron/v2"

	lockkeeper "github.com/lockkeeper/lockkeeper/clients/go"
)

type locker struct {
	client  *lockkeeper.Client
	hold    time.Duration
	options []lockkeeper.Option
}

// New makes a locker for [gocron.WithDistributedLocker]. The key of a job is its name. A job is skipped where another
// machine runs it, or ran it less than hold ago: hold is for how much the clocks of the machines may differ, or a short
// job would run again on one that is behind. It must be less than the time between two runs.
func New(client *lockkeeper.Client, hold time.Duration, options ...lockkeeper.Option) gocron.Locker {
	return locker{client, hold, options}
}

// Lock takes the lock if nobody holds it.
func (l locker) Lock(ctx context.Context, key string) (gocron.Lock, error) {
	held, err := l.client.TryAcquire(ctx, key, l.options...)
	if err != nil {
		return nil, err
	}
	return lock{held, l.hold}, nil
}

type lock struct {
	held *lockkeeper.Lock
	hold time.Duration
}

// Unlock gives it back when the job has ended, but not before hold has passed.
func (l lock) Unlock(ctx context.Context) error { return l.held.ReleaseAfter(ctx, l.hold) }
