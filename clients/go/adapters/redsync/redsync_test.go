package redsync_test

import (
	"context"
	"errors"
	"testing"
	"time"

	real "github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"

	"github.com/lockkeeper/lockkeeper/clients/go/adapters/internal/server"
	"github.com/lockkeeper/lockkeeper/clients/go/adapters/redsync"
)

// mutex is what redsync's Mutex can do.
type mutex interface {
	Name() string
	Value() string
	Until() time.Time
	TryLock() error
	TryLockContext(context.Context) error
	Lock() error
	LockContext(context.Context) error
	Unlock() (bool, error)
	UnlockContext(context.Context) (bool, error)
	Extend() (bool, error)
	ExtendContext(context.Context) (bool, error)
	Valid() (bool, error)
	ValidContext(context.Context) (bool, error)
}

func TestItDoesWhatRedsyncDoes(t *testing.T) {
	rdb, client := server.Start(t)
	theirs, ours := real.New(goredis.NewPool(rdb)), redsync.New(client)
	for name, pair := range map[string][2]mutex{
		"redsync":               {theirs.NewMutex("book", real.WithExpiry(8*time.Second)), theirs.NewMutex("book", real.WithTries(2), real.WithRetryDelay(time.Millisecond))},
		"ours":                  {ours.NewMutex("book", redsync.WithExpiry(8*time.Second)), ours.NewMutex("book", redsync.WithTries(2), redsync.WithRetryDelay(time.Millisecond))},
		"ours keeps theirs out": {ours.NewMutex("book"), theirs.NewMutex("book", real.WithTries(2), real.WithRetryDelay(time.Millisecond))},
		"theirs keeps ours out": {theirs.NewMutex("book"), ours.NewMutex("book", redsync.WithTries(2), redsync.WithRetryDelay(time.Millisecond))},
	} {
		t.Run(name, func(t *testing.T) {
			one, other := pair[0], pair[1]
			if err := one.Lock(); err != nil {
				t.Fatal(err)
			}
			if left := time.Until(one.Until()); left < 6*time.Second || left > 8*time.Second || one.Value() == "" {
				t.Fatal(left, one.Value())
			}
			if other.TryLock() == nil || other.Lock() == nil {
				t.Fatal("two hold it")
			}
			for what, ask := range map[string]func() (bool, error){"extend": one.Extend, "valid": one.Valid} {
				if is, err := ask(); !is || err != nil {
					t.Fatal(what, is, err)
				}
			}
			if is, err := one.Unlock(); !is || err != nil {
				t.Fatal(is, err)
			}
			if is, _ := one.Unlock(); is {
				t.Fatal("it was unlocked twice")
			}
			if is, _ := one.Valid(); is {
				t.Fatal("it is valid after it was unlocked")
			}
			if err := other.TryLock(); err != nil {
				t.Fatal(err)
			}
			if is, err := other.Unlock(); !is || err != nil {
				t.Fatal(is, err)
			}
		})
	}
}

func TestALockThatIsLostIsTold(t *testing.T) {
	rdb, client := server.Start(t)
	mutex := redsync.New(client).NewMutex("book")
	if err := mutex.Lock(); err != nil {
		t.Fatal(err)
	}
	rdb.Del(context.Background(), "book")
	if is, err := mutex.Extend(); is || !errors.Is(err, redsync.ErrExtendFailed) {
		t.Fatal(is, err)
	}
	if is, err := mutex.Unlock(); is || !errors.Is(err, redsync.ErrLockAlreadyExpired) {
		t.Fatal(is, err)
	}
}
