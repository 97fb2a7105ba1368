package lockkeeper_test

import (
	"context"
	"errors"
	"fmt"

	lockkeeper "github.com/lockkeeper/lockkeeper/clients/go"
)

// At most four of a kind at once, on however many machines.
func ExampleWithLimit() {
	rdb, client := clients()
	defer close(rdb, client)
	ctx := context.Background()
	train := func(context.Context, *lockkeeper.Lock) error { fmt.Println("training"); return nil }

	err := client.Do(ctx, "gpu:pool", train, lockkeeper.WithLimit(4)) // waits for one of four places
	if err != nil {
		fmt.Println(err)
	}
	// Output: training
}

// Who reads, and then has to write.
func ExampleLock_Upgrade() {
	rdb, client := clients()
	defer close(rdb, client)
	ctx := context.Background()
	isStale := func(context.Context) bool { return true }
	rewrite := func(_ context.Context, fence int64) { fmt.Println("writing with a fence:", fence > 0) }

	err := client.Do(ctx, "report:7", func(ctx context.Context, lock *lockkeeper.Lock) error {
		if !isStale(ctx) {
			return nil
		}
		err := lock.Upgrade(ctx)
		if errors.Is(err, lockkeeper.ErrBusy) {
			return nil // others read as well: nobody writes now
		}
		if err == nil {
			rewrite(ctx, lock.Fence()) // alone, and with a new fence
			err = lock.Downgrade(ctx)  // the next readers come in
		}
		return err
	}, lockkeeper.Shared())
	fmt.Println(err)
	// Output:
	// writing with a fence: true
	// <nil>
}
