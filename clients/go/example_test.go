package lockkeeper_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	lockkeeper "github.com/lockkeeper/lockkeeper/clients/go"
)

func clients() (*redis.Client, *lockkeeper.Client) {
	rdb := redis.NewClient(&redis.Options{Addr: lockkeeper.ExampleAddr})
	client, err := lockkeeper.New(rdb)
	if err != nil {
		panic(err)
	}
	return rdb, client
}

func close(rdb *redis.Client, client *lockkeeper.Client) {
	_ = client.Close(context.Background())
	_ = rdb.Close()
}

func sendInvoices(_ context.Context, fence int64) error {
	fmt.Println("sending with a fence:", fence > 0)
	return nil
}

func Example() {
	rdb, client := clients()
	defer close(rdb, client)
	ctx := context.Background()

	err := client.Do(ctx, "job:invoices", func(ctx context.Context, lock *lockkeeper.Lock) error {
		return sendInvoices(ctx, lock.Fence()) // ctx is cancelled when the lock is lost
	}, lockkeeper.WithWait(time.Minute))
	switch {
	case errors.Is(err, lockkeeper.ErrBusy):
		fmt.Println("another machine is at it")
	case errors.Is(err, lockkeeper.ErrLost):
		fmt.Println("stopped half-way:", err)
	case err != nil:
		fmt.Println("not done:", err)
	}
	// Output: sending with a fence: true
}

func ExampleClient_TryAcquire() {
	rdb, client := clients()
	defer close(rdb, client)
	ctx := context.Background()

	lock, err := client.TryAcquire(ctx, "order:42", lockkeeper.WithTTL(10*time.Second), lockkeeper.WithLabel("till-3"))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lock.Release(context.WithoutCancel(ctx))
	_, err = client.TryAcquire(ctx, "order:42")
	fmt.Println(errors.Is(err, lockkeeper.ErrBusy), lock.Remaining() > 9*time.Second, lock.Err())
	// Output: true true <nil>
}

// A leader election: whoever gets the lock leads, with all that belongs to it in one errgroup, until it is lost.
func ExampleClient_Do_leaderElection() {
	rdb, client := clients()
	defer close(rdb, client)
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()

	started := make(chan bool)
	lead := func(ctx context.Context, lock *lockkeeper.Lock) error {
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() error { fmt.Println("leading"); started <- true; return nil })
		group.Go(func() error { <-ctx.Done(); return context.Cause(ctx) })
		return group.Wait()
	}
	campaign := func() error {
		for {
			err := client.Do(ctx, "leader", lead, lockkeeper.WithTTL(3*time.Second))
			if ctx.Err() != nil || !errors.Is(err, lockkeeper.ErrLost) {
				return err
			}
			fmt.Println("not leading any more")
		}
	}

	ended := make(chan error)
	go func() { ended <- campaign() }()
	<-started
	rdb.Del(ctx, "leader") // somebody deletes the lock: that is noticed at the next renewal
	<-started
	stop()
	<-ended
	// Output:
	// leading
	// not leading any more
	// leading
}

// A job that all machines want to run at the same minute, although their clocks differ by some seconds.
func ExampleLock_ReleaseAfter() {
	rdb, client := clients()
	defer close(rdb, client)
	ctx := context.Background()
	var runs atomic.Int32

	atMinute := func() {
		lock, err := client.TryAcquire(ctx, "cron:report")
		if err != nil {
			return // another machine runs it, or has just run it
		}
		runs.Add(1)
		_ = lock.ReleaseAfter(ctx, 30*time.Second) // kept until 30 s after the grant; this does not wait
	}

	var machines sync.WaitGroup
	for range 5 {
		machines.Add(1)
		go func() { defer machines.Done(); atMinute() }()
	}
	machines.Wait()
	atMinute() // on a clock that is behind
	fmt.Println("ran", runs.Load(), "time")
	// Output: ran 1 time
}
