package lockkeeper_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	lockkeeper "github.com/lockkeeper/lockkeeper/clients/go"
)

// work is what each of several processes does, of which one works at a time.
func work() {
	rdb := redis.NewClient(&redis.Options{Addr: os.Getenv(lockkeeper.ExampleWorker)})
	client, err := lockkeeper.New(rdb)
	if err != nil {
		panic(err)
	}
	err = client.Do(context.Background(), "shift", func(ctx context.Context, lock *lockkeeper.Lock) error {
		fmt.Println("working")
		for lock.Err() == nil { // by the clock: right even if the process was stopped just now
			time.Sleep(time.Millisecond)
		}
		return lock.Err()
	}, lockkeeper.WithTTL(2*time.Second))
	var lost *lockkeeper.LostError
	if errors.As(err, &lost) {
		fmt.Println("lost:", lost.Why)
	}
}

// The tests run this program once more as a worker.
func init() {
	if os.Getenv(lockkeeper.ExampleWorker) != "" {
		work()
		os.Exit(0)
	}
}

// Several workers keep one lock with their watchdogs. One of them is stopped for longer than its ttl, goes on, and knows.
func ExampleLock_Err() {
	rdb, client := clients()
	defer close(rdb, client)
	program, err := os.Executable()
	if err != nil {
		panic(err)
	}
	worker := exec.Command(program)
	worker.Env = append(os.Environ(), lockkeeper.ExampleWorker+"="+lockkeeper.ExampleAddr)
	output, _ := worker.StdoutPipe()
	if err := worker.Start(); err != nil {
		panic(err)
	}
	defer worker.Wait()
	lines := bufio.NewScanner(output)
	says := func() string { lines.Scan(); return lines.Text() }
	fmt.Println("the first is", says())

	_ = worker.Process.Signal(syscall.SIGSTOP)
	next, err := client.Acquire(context.Background(), "shift") // a ttl later
	fmt.Println("the next is working:", err == nil)
	_ = worker.Process.Signal(syscall.SIGCONT)
	fmt.Println("the first has", says())
	fmt.Println("the next is unharmed:", next.Renew(context.Background()) == nil)
	_ = next.Release(context.Background())
	// Output:
	// the first is working
	// the next is working: true
	// the first has lost: expired
	// the next is unharmed: true
}
