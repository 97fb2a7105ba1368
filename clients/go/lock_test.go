package lockkeeper

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

func TestALockIsHeldUntilItIsReleased(t *testing.T) {
	s := startServer(t)
	client := s.client(t)
	lock := hold(t, client, "book", WithLabel("till 3"))
	_, err := client.TryAcquire(ctx, "book")
	mustErr(t, err, ErrBusy)
	if left := lock.Remaining(); left < 25*time.Second || left > 29698*time.Millisecond {
		t.Fatal(left)
	}
	if lock.Err() != nil || !strings.HasPrefix(lock.Owner(), "till 3:") {
		t.Fatal(lock.Err(), lock.Owner())
	}
	info, err := client.Info(ctx, "book")
	if err != nil || info.Owner != lock.Owner() || info.Fence != lock.Fence() {
		t.Fatal(info, err)
	}
	mustErr(t, lock.Renew(ctx), nil)
	mustErr(t, lock.Release(ctx), nil)
	mustErr(t, lock.Release(ctx), nil)
	mustErr(t, lock.Err(), ErrReleased)
	mustErr(t, lock.Renew(ctx), ErrReleased)
	mustBe(t, lock.Remaining(), 0)
	select {
	case <-lock.Lost():
		t.Fatal("a lock that was released is not lost")
	default:
	}
	again := hold(t, client, "book")
	if again.Fence() <= lock.Fence() || again.Owner() == lock.Owner() {
		t.Fatal(again, lock)
	}
	again.Leave()
	mustErr(t, again.Err(), ErrReleased)
	mustBe(t, s.ask(t, "EXISTS", "book").(int64), 1)
	mustErr(t, client.ReleaseFor(ctx, "book", again.Owner()), nil)
	mustErr(t, client.ReleaseFor(ctx, "book", again.Owner()), ErrLost)
}

func TestWhatMakesNoSenseIsRefusedBeforeAnythingIsSent(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer rdb.Close()
	client := clientOf(t, rdb)
	for _, option := range []Option{
		WithTTL(99 * time.Millisecond), WithTTL(-1), WithLabel(strings.Repeat("x", maxLabel+1)), WithMaxHold(0), WithMinReplicas(-1),
	} {
		_, err := client.Acquire(ctx, "book", option)
		mustErr(t, err, ErrInvalid)
		_, err = New(rdb, option)
		mustErr(t, err, ErrInvalid)
	}
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	defer ring.Close()
	for _, other := range []redis.UniversalClient{nil, ring, (*redis.Client)(nil), struct{ *redis.Client }{rdb}} {
		_, err := New(other)
		mustErr(t, err, ErrInvalid)
	}
}

func TestAServerThatIsNotThereOrHasNoModuleIsToldAtOnce(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer rdb.Close()
	client := clientOf(t, rdb)
	for _, ask := range []func(context.Context, string, ...Option) (*Lock, error){client.Acquire, client.TryAcquire} {
		_, err := ask(ctx, "book")
		mustErr(t, err, ErrUnreachable)
	}
	_, err := client.Acquire(ctx, "book", WithWait(50*time.Millisecond))
	mustErr(t, err, ErrUnreachable)
	bare := startAt(t, freePort()).client(t)
	_, err = bare.Acquire(ctx, "book")
	mustErr(t, err, ErrModuleMissing)
	mustErr(t, err, ErrRefused)
	mustErr(t, bare.ReleaseFor(ctx, "book", "x"), ErrModuleMissing)
}

func TestASectionCostsTwoCommandsAndAConnectionThree(t *testing.T) {
	s := startServer(t)
	client := s.client(t)
	s.ask(t, "PING")
	count := func() string { return s.redis(t).Info(ctx, "commandstats").Val() }
	for range 3 {
		mustErr(t, hold(t, client, "book").Release(ctx), nil)
	}
	stats := count()
	for _, line := range []string{
		"cmdstat_lock.acquire:calls=3,", "cmdstat_lock.release:calls=3,", "cmdstat_client|setname:calls=1,",
	} {
		if !strings.Contains(stats, line) {
			t.Errorf("%s is not in %s", line, stats)
		}
	}
	if strings.Contains(stats, "lock.renew") || strings.Contains(stats, "lock.info") {
		t.Error(stats)
	}
	lock := hold(t, client, "book")
	granted := make(chan *Lock)
	go func() {
		lock, err := client.Acquire(ctx, "book")
		mustErr(t, err, nil)
		granted <- lock
	}()
	eventually(t, "it waits", func() bool { return s.waiters(t, "book") == 1 })
	mustErr(t, lock.Release(ctx), nil)
	mustErr(t, (<-granted).Release(ctx), nil)
	if stats := count(); !strings.Contains(stats, "cmdstat_lock.acquire:calls=6,") || !strings.Contains(stats, "cmdstat_lock.release:calls=5,") {
		t.Error(stats)
	}
}

func TestALockIsRenewedWhileItIsHeld(t *testing.T) {
	s := startServer(t)
	lock := hold(t, s.client(t), "book", WithTTL(3*time.Second))
	for range 80 {
		time.Sleep(50 * time.Millisecond)
		if lock.Remaining() == 0 || s.ask(t, "PTTL", "book").(int64) <= 0 {
			t.Fatal(lock.Err())
		}
	}
	mustErr(t, lock.Extend(ctx, 10*time.Second), nil)
	time.Sleep(500 * time.Millisecond)
	if left := s.ask(t, "PTTL", "book").(int64); left < 5000 {
		t.Fatalf("an extended lease was cut to %d ms", left)
	}
	mustErr(t, lock.Release(ctx), nil)
}

func TestALossIsToldWithItsReasonAndHarmsNobody(t *testing.T) {
	s := startServer(t)
	client := s.client(t, WithTTL(3*time.Second))
	deleted := hold(t, client, "deleted")
	held, cancel := deleted.Context(ctx)
	defer cancel()
	s.ask(t, "DEL", "deleted")
	mustLose(t, deleted, Gone)
	<-held.Done()
	mustErr(t, context.Cause(held), ErrLost)
	mustErr(t, deleted.Renew(ctx), ErrLost)
	mustErr(t, deleted.Release(ctx), ErrLost)

	robbed := hold(t, client, "robbed")
	s.ask(t, "SET", "robbed", "another", "PX", 60000)
	mustErr(t, robbed.Renew(ctx), ErrLost)
	mustLose(t, robbed, Taken)
	mustErr(t, robbed.Release(ctx), ErrLost)
	mustBe(t, s.ask(t, "GET", "robbed").(string), "another")

	short := hold(t, client, "short", WithMaxHold(200*time.Millisecond))
	mustLose(t, short, MaxHold)
	mustErr(t, short.Release(ctx), nil)

	unkept := hold(t, client, "unkept", WithTTL(500*time.Millisecond), WithoutRenewal())
	mustLose(t, unkept, Expired)
	mustErr(t, unkept.Release(ctx), ErrLost)
}

func TestAServerThatStopsMakesTheLockExpireBeforeItsTime(t *testing.T) {
	s := startServer(t)
	client := s.client(t)
	lock := hold(t, client, "book", WithTTL(time.Second))
	ends := time.Now().Add(time.Duration(s.ask(t, "PTTL", "book").(int64)) * time.Millisecond)
	s.signal(t, syscall.SIGSTOP)
	mustLose(t, lock, Expired)
	if late := time.Since(ends); late > 0 && late > 700*time.Millisecond {
		// It may have been renewed once since we looked.
		t.Fatalf("told %v after the server may have let go", late)
	}
	s.signal(t, syscall.SIGCONT)
	mustErr(t, lock.Release(ctx), ErrLost)
	eventually(t, "it is free", func() bool { return s.ask(t, "EXISTS", "book").(int64) == 0 })
}

func TestAStopThatIsShorterThanTheLeaseLosesNothing(t *testing.T) {
	s := startServer(t)
	lock := hold(t, s.client(t), "book", WithTTL(6*time.Second))
	s.signal(t, syscall.SIGSTOP)
	time.Sleep(3500 * time.Millisecond)
	s.signal(t, syscall.SIGCONT)
	mustErr(t, lock.Renew(ctx), nil)
	mustErr(t, lock.Release(ctx), nil)
}

func TestWhoWaitsIsServedInOrder(t *testing.T) {
	s := startServer(t)
	client := s.client(t)
	lock := hold(t, client, "book")
	served := make(chan int, 5)
	for i := range 5 {
		go func() {
			lock, err := client.Acquire(ctx, "book")
			mustErr(t, err, nil)
			served <- i
			mustErr(t, lock.Release(ctx), nil)
		}()
		eventually(t, "it waits", func() bool { return s.waiters(t, "book") == int64(i+1) })
	}
	mustErr(t, lock.Release(ctx), nil)
	for i := range 5 {
		mustBe(t, <-served, i)
	}
}

func TestAWaitEndsInTimeAndByItsContext(t *testing.T) {
	s := startServer(t)
	client := s.client(t)
	lock := hold(t, client, "book")
	_, err := client.Acquire(ctx, "book", WithWait(50*time.Millisecond))
	mustErr(t, err, ErrBusy)
	limited, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	_, err = client.Acquire(limited, "book")
	mustErr(t, err, context.DeadlineExceeded)
	eventually(t, "no place is left", func() bool { return s.waiters(t, "book") == 0 })
	s.signal(t, syscall.SIGSTOP)
	began := time.Now()
	_, err = client.Acquire(ctx, "book", WithWait(200*time.Millisecond))
	s.signal(t, syscall.SIGCONT)
	mustErr(t, err, ErrUnreachable)
	if late := time.Since(began); late > 2*time.Second {
		t.Fatal(late)
	}
	mustErr(t, lock.Release(ctx), nil)
}

// Trap 23: go-redis neither returns from a blocked read when its context ends, nor sends a RELEASE by such a context.
func TestAcquiresThatAreCancelledAtAnyMomentLeaveNothing(t *testing.T) {
	s := startServer(t)
	client := s.client(t)
	rounds := 10000
	if testing.Short() {
		rounds = 500
	}
	var group sync.WaitGroup
	work := make(chan int)
	for range 16 {
		group.Add(1)
		go func() {
			defer group.Done()
			for round := range work {
				limited, cancel := context.WithCancel(ctx)
				timer := time.AfterFunc(time.Duration(rand.IntN(6000))*time.Microsecond, cancel)
				lock, err := client.Acquire(limited, fmt.Sprint("book ", round%5))
				if err == nil {
					err = lock.Release(limited)
				}
				if err != nil && !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
				timer.Stop()
				cancel()
			}
		}()
	}
	for round := range rounds {
		work <- round
	}
	close(work)
	group.Wait()
	limited, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	mustErr(t, client.Settled(limited), nil)
	for i := range 5 {
		mustErr(t, hold(t, client, fmt.Sprint("book ", i)).Release(ctx), nil)
		mustBe(t, s.waiters(t, fmt.Sprint("book ", i)), 0)
	}
}

func TestAWaitThatIsCancelledReturnsAtOnce(t *testing.T) {
	s := startServer(t)
	client := s.client(t)
	defer hold(t, client, "book").Release(ctx)
	cancelWait(t, s, client)
	began := time.Now()
	eventually(t, "its connection is closed", func() bool { return s.ours(t) == 1 })
	if late := time.Since(began); late > 4*time.Second {
		t.Fatal(late) // without a half-close it is read for 5 s
	}
}

// cancelWait waits for the lock "book", which somebody holds, and cancels that.
func cancelWait(t *testing.T, s *server, client *Client) {
	t.Helper()
	limited, cancel := context.WithCancelCause(ctx)
	returned := make(chan error)
	go func() {
		_, err := client.Acquire(limited, "book")
		returned <- err
	}()
	eventually(t, "it waits", func() bool { return s.waiters(t, "book") == 1 })
	cancel(errors.New("the user has gone"))
	select {
	case err := <-returned:
		mustErr(t, err, context.Canceled)
	case <-time.After(patience / 2):
		t.Fatal("it waits on")
	}
	eventually(t, "its place is given up", func() bool { return s.waiters(t, "book") == 0 })
}

// Trap 23.
func TestAReleaseWithAContextThatHasEndedIsCarriedOut(t *testing.T) {
	s, sent := startServer(t), &transcript{}
	lock := hold(t, clientOf(t, s.redis(t, sent.dialer)), "book")
	over, cancel := context.WithCancel(ctx)
	cancel()
	if err := lock.Release(over); err != nil && !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	mustErr(t, lock.Release(ctx), nil)
	mustBe(t, s.ask(t, "EXISTS", "book").(int64), 0)
	mustBe(t, sent.count("SETNAME"), 1) // at the first attempt, over the connection that was there
	for range 20 {
		mustErr(t, lock.Release(over), nil) // it is known by now
	}
}

// Trap 1: the user's client has a will of its own.
func TestTheLimitsOfTheUsersClientAreNotOurs(t *testing.T) {
	s := startServer(t)
	rdb := s.redis(t, func(o *redis.Options) {
		o.PoolSize, o.ReadTimeout, o.PoolTimeout, o.MaxRetries = 1, 50*time.Millisecond, 50*time.Millisecond, 3
	})
	client := clientOf(t, rdb, WithTTL(3*time.Second))
	lock := hold(t, client, "book")
	var group sync.WaitGroup
	defer group.Wait()
	busy, cancel := context.WithCancel(ctx)
	defer cancel()
	group.Add(1)
	go func() { // uses up the pool
		defer group.Done()
		for busy.Err() == nil {
			rdb.BLPop(busy, 100*time.Millisecond, "nothing")
		}
	}()
	_, err := client.Acquire(ctx, "book", WithWait(time.Second))
	mustErr(t, err, ErrBusy)
	mustErr(t, lock.Renew(ctx), nil)
	stats := s.redis(t).Info(ctx, "commandstats").Val()
	if !strings.Contains(stats, "cmdstat_lock.acquire:calls=3,") {
		t.Fatalf("a wait was sent again: %s", stats)
	}
	mustErr(t, lock.Release(ctx), nil)
}

// transcript is what was written on all connections.
type transcript struct {
	mu      sync.Mutex
	written []byte
}

func (r *transcript) dialer(o *redis.Options) {
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		raw, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		return recorded{raw, r}, err
	}
}

func (r *transcript) count(word string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Count(strings.ToUpper(string(r.written)), word)
}

type recorded struct {
	net.Conn
	transcript *transcript
}

func (c recorded) Write(p []byte) (int, error) {
	c.transcript.mu.Lock()
	c.transcript.written = append(c.transcript.written, p...)
	c.transcript.mu.Unlock()
	return c.Conn.Write(p)
}

// Trap 1: go-redis sends again what was refused with MASTERDOWN, and says on each connection what it is.
func TestNothingIsSentThatWeDidNotAskFor(t *testing.T) {
	s, sent := startServer(t, "--replica-read-only", "no", "--replica-serve-stale-data", "no"), &transcript{}
	s.ask(t, "REPLICAOF", "127.0.0.1", freePort())
	client := clientOf(t, s.redis(t, sent.dialer, func(o *redis.Options) { o.MaxRetries = 3 }))
	_, err := client.TryAcquire(ctx, "book")
	mustErr(t, err, ErrRefused)
	mustBe(t, sent.count("LOCK.ACQUIRE"), 2) // by us: the master may have been found by then
	for _, word := range []string{"SETINFO", "MAINT_NOTIFICATIONS"} {
		mustBe(t, sent.count(word), 0)
	}
}

func TestDoJoinsTheErrorsBodyFirst(t *testing.T) {
	s := startServer(t)
	client := s.client(t, WithTTL(500*time.Millisecond))
	mine := errors.New("out of paper")
	err := client.Do(ctx, "book", func(ctx context.Context, lock *Lock) error {
		s.ask(t, "DEL", "book")
		<-ctx.Done()
		mustErr(t, context.Cause(ctx), ErrLost)
		return mine
	})
	mustErr(t, err, mine)
	mustErr(t, err, ErrLost)
	if !strings.HasPrefix(err.Error(), mine.Error()) {
		t.Fatal(err)
	}
	err = client.Do(ctx, "book", func(ctx context.Context, lock *Lock) error {
		s.ask(t, "DEL", "book")
		<-ctx.Done()
		return context.Cause(ctx)
	})
	mustErr(t, err, ErrLost)
	if strings.Count(err.Error(), ErrLost.Error()) != 1 {
		t.Fatalf("it is said twice: %v", err)
	}
	mustBe(t, client.Do(ctx, "book", func(context.Context, *Lock) error { return mine }), mine)
	func() {
		defer func() { mustBe(t, recover(), any("as asked")) }()
		_ = client.Do(ctx, "book", func(context.Context, *Lock) error { panic("as asked") })
	}()
	mustBe(t, s.ask(t, "EXISTS", "book").(int64), 0)
	over, cancel := context.WithCancel(ctx)
	mustErr(t, client.Do(over, "book", func(context.Context, *Lock) error { cancel(); return nil }), nil)
	mustBe(t, s.ask(t, "EXISTS", "book").(int64), 0)
}

func TestNothingIsOpenBeforeTheFirstLockNorTenSecondsAfterTheLast(t *testing.T) {
	if testing.Short() {
		t.Skip("it takes 11 s")
	}
	s := startServer(t)
	rdb := s.redis(t)
	client, err := New(rdb) // not closed by the test
	mustErr(t, err, nil)
	mustBe(t, s.ours(t), 0)
	mustBe(t, client.running, false)
	mustErr(t, hold(t, client, "book").Release(ctx), nil)
	mustBe(t, s.ours(t), 1)
	time.Sleep(11 * time.Second)
	eventually(t, "it is over", func() bool {
		client.mu.Lock()
		defer client.mu.Unlock()
		return !client.running
	})
	mustBe(t, s.ours(t), 0)
	mustErr(t, hold(t, client, "book").Release(ctx), nil)
	mustErr(t, client.Close(ctx), nil)
}

func TestALockThatIsForgottenIsReleasedSomeTime(t *testing.T) {
	s := startServer(t)
	client := s.client(t)
	watched, cancel := hold(t, client, "book").Context(ctx)
	for range 3 {
		runtime.GC()
	}
	mustBe(t, s.ask(t, "EXISTS", "book").(int64), 1)
	mustErr(t, watched.Err(), nil)
	cancel() // which has kept it until now
	eventually(t, "it is released", func() bool {
		runtime.GC()
		return s.ask(t, "EXISTS", "book").(int64) == 0
	})
}

func TestWhatIsClosedIsGivenBack(t *testing.T) {
	s := startServer(t)
	client := s.client(t)
	lock := hold(t, client, "book")
	returned := make(chan error)
	go func() {
		_, err := client.Acquire(ctx, "book")
		returned <- err
	}()
	eventually(t, "it waits", func() bool { return s.waiters(t, "book") == 1 })
	mustErr(t, client.Close(ctx), nil)
	mustErr(t, <-returned, ErrInvalid)
	mustLose(t, lock, Gone)
	mustErr(t, lock.Release(ctx), ErrLost)
	mustBe(t, s.ask(t, "EXISTS", "book").(int64), 0)
	mustBe(t, s.ours(t), 0)
	_, err := client.TryAcquire(ctx, "book")
	mustErr(t, err, ErrInvalid)
}

func TestTenThousandLocksAreRenewedInTimeOverFewConnections(t *testing.T) {
	s := startServer(t)
	client := s.client(t, WithTTL(20*time.Second))
	count := 10000
	if testing.Short() {
		count = 1000
	}
	locks, room := make([]*Lock, count), make(chan bool, 30)
	var group sync.WaitGroup
	for i := range locks {
		group.Add(1)
		room <- true
		go func() {
			defer group.Done()
			locks[i] = hold(t, client, fmt.Sprint("book ", i))
			<-room
		}()
	}
	group.Wait()
	time.Sleep(8 * time.Second)
	for _, lock := range locks {
		if left := lock.Remaining(); left < 10*time.Second {
			t.Fatal(left)
		}
	}
	mustErr(t, client.Close(ctx), nil)
	mustBe(t, s.ask(t, "DBSIZE").(int64), 0)
}

// Trap 24.
func TestTheClockRunsSinceBoot(t *testing.T) {
	text, err := os.ReadFile("/proc/uptime")
	mustErr(t, err, nil)
	var uptime float64
	fmt.Sscan(string(text), &uptime)
	if behind := float64(now())/second - uptime; behind < -1 || behind > 1 {
		t.Fatal(behind)
	}
}

// Trap 24: a time namespace is as if the machine had been suspended, for which only the clock of the boot went on.
func TestTheClockRunsThroughSuspend(t *testing.T) {
	as := []string{"--user", "--map-root-user", "--time", "--boottime", "1000000", "--fork"}
	if err := exec.Command("unshare", append(as, "true")...).Run(); err != nil {
		t.Skip("NOT TESTED: no namespace of time can be made here: ", err)
	}
	program, err := os.Executable()
	mustErr(t, err, nil)
	run(t, "unshare", append(as, program, "-test.run=^TestTheClockRunsSinceBoot$")...)
}

// Trap 24.
func TestALongTTLFits(t *testing.T) {
	s := startServer(t)
	lock := hold(t, s.client(t), "book", WithTTL(1<<63-1))
	if left := lock.Remaining(); left < 30*365*24*time.Hour {
		t.Fatal(left)
	}
	mustErr(t, lock.Release(ctx), nil)
}
