package main

import (
	"context"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"

	lockkeeper "github.com/lockkeeper/lockkeeper/clients/go"
)

const ttl = 30 * time.Second

var background = context.Background()

// locker is one client's way to the one lock. Both calls end when the lock is held, or is not any longer.
type locker interface {
	acquire() error
	release() error
}

// variants makes a locker for each client; all share the pool of one go-redis client.
var variants = map[string]func(*redis.Client) (func() locker, error){
	"helper": func(rdb *redis.Client) (func() locker, error) {
		client, err := lockkeeper.New(rdb)
		return func() locker { return &helper{client: client} }, err
	},
	"commands": func(rdb *redis.Client) (func() locker, error) {
		return func() locker { return &commands{rdb: rdb, owner: newOwner()} }, nil
	},
	"redislock":      redislockWith(100 * time.Millisecond), // as its README shows it
	"redislock-10ms": redislockWith(10 * time.Millisecond),
	"redsync":        redsyncWith(redsync.WithExpiry(ttl)), // 32 tries, 50 to 250 ms apart
	"redsync-10ms":   redsyncWith(redsync.WithExpiry(ttl), redsync.WithTries(1000), redsync.WithRetryDelay(10*time.Millisecond)),
}

type helper struct {
	client *lockkeeper.Client
	lock   *lockkeeper.Lock
}

func (h *helper) acquire() (err error) {
	h.lock, err = h.client.Acquire(background, "lock")
	return err
}

func (h *helper) release() error { return h.lock.Release(background) }

// commands are the two commands of the helper by go-redis: what is left of its cost is go-redis' own.
type commands struct {
	rdb   *redis.Client
	owner string
}

func (c *commands) acquire() error {
	return c.rdb.Do(background, "LOCK.ACQUIRE", "lock", c.owner, ttl.Milliseconds(), "WAIT", 60_000).Err()
}

func (c *commands) release() error {
	return c.rdb.Do(background, "LOCK.RELEASE", "lock", c.owner).Err()
}

type redislocker struct {
	client *redislock.Client
	every  time.Duration
	lock   *redislock.Lock
}

func redislockWith(every time.Duration) func(*redis.Client) (func() locker, error) {
	return func(rdb *redis.Client) (func() locker, error) {
		client := redislock.New(rdb)
		return func() locker { return &redislocker{client: client, every: every} }, nil
	}
}

func (l *redislocker) acquire() (err error) {
	l.lock, err = l.client.Obtain(background, "lock", ttl, &redislock.Options{RetryStrategy: redislock.LinearBackoff(l.every)})
	return err
}

func (l *redislocker) release() error { return l.lock.Release(background) }

type redsyncer struct{ mutex *redsync.Mutex }

func redsyncWith(options ...redsync.Option) func(*redis.Client) (func() locker, error) {
	return func(rdb *redis.Client) (func() locker, error) {
		all := redsync.New(goredis.NewPool(rdb))
		return func() locker { return redsyncer{all.NewMutex("lock", options...)} }, nil
	}
}

// acquire asks for the whole to be repeated when it gives up after its tries.
func (l redsyncer) acquire() error {
	for l.mutex.Lock() != nil {
	}
	return nil
}

func (l redsyncer) release() error {
	_, err := l.mutex.Unlock()
	return err
}
