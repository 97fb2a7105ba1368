package lockkeeper

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// worker makes this program hold a lock on the server at that address, as one of several processes.
const worker = "LOCKKEEPER_TEST_WORKER"

func work() {
	rdb := redis.NewClient(&redis.Options{Addr: os.Getenv(worker)})
	client, err := New(rdb)
	if err != nil {
		panic(err)
	}
	err = client.Do(ctx, "book", func(ctx context.Context, lock *Lock) error {
		fmt.Println("held")
		for lock.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		<-ctx.Done()
		return context.Cause(ctx)
	}, WithTTL(2*time.Second))
	var lost *LostError
	if errors.As(err, &lost) {
		fmt.Println("lost", lost.Why)
	} else {
		fmt.Println(err)
	}
}

// Several workers have a watchdog on one key. One of them is stopped for longer than its ttl, goes on, and knows.
func TestAProcessThatWasStoppedKnowsWhenItGoesOn(t *testing.T) {
	s := startServer(t)
	program, err := os.Executable()
	mustErr(t, err, nil)
	process := exec.Command(program)
	process.Env = append(os.Environ(), worker+"="+s.addr)
	output, err := process.StdoutPipe()
	mustErr(t, err, nil)
	mustErr(t, process.Start(), nil)
	defer func() { _ = process.Process.Kill(); _ = process.Wait() }()
	lines := bufio.NewScanner(output)
	says := func() string { lines.Scan(); return lines.Text() }
	mustBe(t, says(), "held")
	time.Sleep(2500 * time.Millisecond) // it is renewed

	mustErr(t, process.Process.Signal(syscall.SIGSTOP), nil)
	next, err := s.client(t).Acquire(ctx, "book", WithWait(patience))
	mustErr(t, err, nil)
	mustErr(t, process.Process.Signal(syscall.SIGCONT), nil)
	mustBe(t, says(), "lost expired")
	mustErr(t, next.Renew(ctx), nil)
	mustErr(t, next.Release(ctx), nil)
}
