package lockkeeper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

func TestALimitIsSaidAsTheServerUnderstandsIt(t *testing.T) {
	for _, each := range []struct {
		options  []Option
		expected command
	}{
		{nil, command{}},
		{[]Option{WithLimit(1)}, command{}},
		{[]Option{WithLimit(2)}, command{"LIMIT", 2}},
		{[]Option{WithLimit(1000)}, command{"SHARED"}},
		{[]Option{Shared()}, command{"SHARED"}},
		{[]Option{WithLimit(3), WithLimit(4)}, command{"LIMIT", 4}},
	} {
		s := defaults().with(each.options)
		mustErr(t, s.invalid, nil)
		asked := acquireCommand("book", "me", second, s.limit)
		expected := append(command{"LOCK.ACQUIRE", "book", "me", int64(1000)}, each.expected...)
		if !reflect.DeepEqual(asked, expected) {
			t.Errorf("found %v, expected %v", asked, expected)
		}
	}
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer rdb.Close()
	client := clientOf(t, rdb)
	for _, options := range [][]Option{
		{WithLimit(0)}, {WithLimit(-1)}, {WithLimit(1001)}, {WithLimit(2), Shared()}, {Shared(), WithLimit(2)},
	} {
		_, err := client.Acquire(ctx, "book", options...)
		mustErr(t, err, ErrInvalid)
	}
}

func TestALockMayBeAnotherThanThoseOfItsClient(t *testing.T) {
	s := startServer(t)
	client := s.client(t, WithLimit(2))
	for _, option := range []Option{WithLimit(3), Shared()} {
		one, another := hold(t, client, "book", option), hold(t, client, "book", option)
		_, err := client.TryAcquire(ctx, "book")
		mustErr(t, err, ErrBusy)
		mustErr(t, one.Release(ctx), nil)
		mustErr(t, another.Release(ctx), nil)
	}
}

func TestPlacesAreTakenRenewedAndFreedOneByOne(t *testing.T) {
	s := startServer(t)
	client := s.client(t, WithLimit(2), WithTTL(1500*time.Millisecond))
	one, another := hold(t, client, "pool"), hold(t, client, "pool")
	_, err := client.TryAcquire(ctx, "pool")
	mustErr(t, err, ErrBusy)
	granted := make(chan *Lock)
	go func() {
		lock, err := client.Acquire(ctx, "pool")
		mustErr(t, err, nil)
		granted <- lock
	}()
	time.Sleep(2 * time.Second) // longer than a lease that is not renewed
	mustErr(t, one.Err(), nil)
	mustErr(t, another.Err(), nil)
	mustBe(t, s.waiters(t, "pool"), 1)
	mustErr(t, one.Release(ctx), nil)
	next := <-granted
	mustErr(t, another.Renew(ctx), nil)
	mustErr(t, another.Release(ctx), nil)
	mustErr(t, next.Release(ctx), nil)
	mustBe(t, s.ask(t, "EXISTS", "pool").(int64), 0)
}

// Never more in their sections than the limit says, and no reader beside a writer.
func TestNobodyHasMoreCompanyThanItAllows(t *testing.T) {
	s := startServer(t)
	client := s.client(t)
	var readers, writers atomic.Int32
	var group sync.WaitGroup
	for i := range 12 {
		group.Add(1)
		go func() {
			defer group.Done()
			options, most, inside := []Option{WithLimit(3)}, int32(3), &readers
			if i%4 == 0 {
				options, most, inside = nil, 1, &writers
			}
			for range 20 {
				err := client.Do(ctx, "book", func(context.Context, *Lock) error {
					defer inside.Add(-1)
					if found := inside.Add(1); found > most || writers.Load() > 0 && readers.Load() > 0 {
						return fmt.Errorf("%d readers, %d writers", readers.Load(), writers.Load())
					}
					time.Sleep(time.Millisecond)
					return nil
				}, options...)
				if err != nil {
					t.Error(err)
				}
			}
		}()
	}
	group.Wait()
}

func TestAReaderBecomesAWriterAndAReaderAgain(t *testing.T) {
	s := startServer(t)
	client := s.client(t)
	lock, other := hold(t, client, "book", Shared()), hold(t, client, "book", Shared())
	fence := lock.Fence()
	mustErr(t, lock.Upgrade(ctx), ErrBusy)
	mustErr(t, lock.Err(), nil)
	mustBe(t, lock.Fence(), fence)
	mustErr(t, other.Release(ctx), nil)

	mustErr(t, lock.Upgrade(ctx), nil)
	if lock.Fence() <= other.Fence() {
		t.Fatal(lock, other)
	}
	fence = lock.Fence()
	mustErr(t, lock.Upgrade(ctx), nil)
	mustBe(t, lock.Fence(), fence)
	_, err := client.TryAcquire(ctx, "book", Shared())
	mustErr(t, err, ErrBusy)
	granted := make(chan *Lock)
	go func() {
		lock, err := client.Acquire(ctx, "book", Shared())
		mustErr(t, err, nil)
		granted <- lock
	}()
	eventually(t, "it waits", func() bool { return s.waiters(t, "book") == 1 })
	mustErr(t, lock.Downgrade(ctx), nil)
	if lock.Fence() <= fence {
		t.Fatal(lock, fence)
	}
	reader := <-granted
	mustErr(t, lock.Renew(ctx), nil)
	mustErr(t, reader.Release(ctx), nil)
	mustErr(t, lock.Release(ctx), nil)
	mustErr(t, lock.Upgrade(ctx), ErrReleased)
	mustErr(t, lock.Downgrade(ctx), ErrReleased)
	mustBe(t, s.ask(t, "EXISTS", "book").(int64), 0)
}

func TestALockThatIsLostIsNotTakenAnewByAnUpgrade(t *testing.T) {
	s := startServer(t)
	client := s.client(t)
	lock := hold(t, client, "book", Shared())
	s.ask(t, "DEL", "book")
	mustErr(t, lock.Upgrade(ctx), ErrLost)
	mustBe(t, s.ask(t, "EXISTS", "book").(int64), 0)
	mustLose(t, lock, Gone)
	mustErr(t, lock.Downgrade(ctx), ErrLost)

	lock = hold(t, client, "book", Shared())
	mustErr(t, client.Close(ctx), nil)
	mustErr(t, lock.Upgrade(ctx), ErrLost)
	mustBe(t, s.ask(t, "EXISTS", "book").(int64), 0)
}

func TestAServerThatKnowsOfNoLimitRefuses(t *testing.T) {
	bare := startAt(t, freePort()).client(t)
	_, err := bare.TryAcquire(ctx, "book", Shared())
	mustErr(t, err, ErrModuleMissing)
}

func TestInfoTellsEveryHolder(t *testing.T) {
	s := startServer(t)
	for _, protocol := range []int{2, 3} {
		client := clientOf(t, s.redis(t, func(o *redis.Options) { o.Protocol = protocol }))
		lock := hold(t, client, "book")
		info, err := client.Info(ctx, "book")
		mustErr(t, err, nil)
		if info.Owner != lock.Owner() || info.Limit != 1 || info.Holding != 1 || len(info.Holders) != 1 ||
			info.Holders[0] != (Holder{info.Owner, info.Fence, info.Held, info.TTL, 1}) {
			t.Fatal(info)
		}
		mustErr(t, lock.Release(ctx), nil)

		one, another := hold(t, client, "book", Shared()), hold(t, client, "book", WithLimit(3), WithTTL(time.Second))
		waiting, cancel := context.WithCancel(ctx)
		var group sync.WaitGroup
		group.Add(1)
		go func() {
			defer group.Done()
			_, err := client.Acquire(waiting, "book", WithLimit(2), WithLabel("late"))
			mustErr(t, err, context.Canceled)
		}()
		eventually(t, "it waits", func() bool { return s.waiters(t, "book") == 1 })
		info, err = client.Info(ctx, "book")
		mustErr(t, err, nil)
		if info.Owner != "" || info.Fence != 0 || info.Limit != 3 || info.Holding != 2 || len(info.Holders) != 2 || info.TTL <= time.Second {
			t.Fatal(info)
		}
		for i, lock := range []*Lock{one, another} {
			holder := info.Holders[i]
			if holder.Owner != lock.Owner() || holder.Fence != lock.Fence() || holder.TTL <= 0 || holder.Limit != []int64{1000, 3}[i] {
				t.Fatal(holder, lock)
			}
		}
		mustBe(t, info.Queue[0].Limit, 2)
		mustBe(t, info.knows(one.Owner()) && info.knows(another.Owner()) && info.knows(info.Queue[0].Owner), true)
		mustBe(t, info.knows("a stranger"), false)
		cancel()
		group.Wait()
		mustErr(t, one.Release(ctx), nil)
		mustErr(t, another.Release(ctx), nil)
	}
}

// Whom the server does not name, since it names a hundred, may be there.
func TestWhoIsNotNamedMayHold(t *testing.T) {
	info, err := readInfo([]any{"owner", nil, "fence", nil, "held-ms", nil, "ttl-ms", int64(7), "waiters", int64(0), "queue", []any{},
		"limit", int64(1000), "holding", int64(2), "holders", []any{[]any{"owner", "a", "fence", int64(5), "limit", int64(1000)}}}, nil)
	mustErr(t, err, nil)
	mustBe(t, info.knows("b"), true)
	info.Holding = 1
	mustBe(t, info.knows("b"), false)
	mustBe(t, info.knows("a"), true)
}

// slowNetwork holds back the next request with this word, and all behind it on its connection, until it is let go.
type slowNetwork struct {
	word  atomic.Value
	holds chan bool // closed when it does
	letGo chan bool
}

func newSlowNetwork() *slowNetwork {
	return &slowNetwork{holds: make(chan bool), letGo: make(chan bool)}
}

func (n *slowNetwork) dialer(o *redis.Options) {
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		raw, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		return &slowConnection{Conn: raw, network: n}, err
	}
}

type slowConnection struct {
	net.Conn
	network *slowNetwork
	late    atomic.Pointer[sync.WaitGroup]
}

func (c *slowConnection) Write(p []byte) (int, error) {
	word, _ := c.network.word.Load().(string)
	if word == "" || !bytes.Contains(p, []byte(word)) || !c.network.word.CompareAndSwap(word, "") {
		return c.Conn.Write(p)
	}
	held := bytes.Clone(p)
	group := &sync.WaitGroup{}
	group.Add(1)
	c.late.Store(group)
	close(c.network.holds)
	go func() {
		defer group.Done()
		<-c.network.letGo
		_ = c.Conn.SetWriteDeadline(time.Time{})
		_, _ = c.Conn.Write(held)
	}()
	return len(p), nil
}

func (c *slowConnection) Close() error {
	if group := c.late.Load(); group != nil {
		go func() { group.Wait(); _ = c.Conn.Close() }()
		return nil
	}
	return c.Conn.Close()
}

func TestALockThatIsReleasedDuringItsUpgradeIsNotTakenAnew(t *testing.T) {
	s, slow := startServer(t), newSlowNetwork()
	lock := hold(t, clientOf(t, s.redis(t, slow.dialer), WithTTL(10*time.Minute)), "book", Shared())
	slow.word.Store("LOCK.ACQUIRE")
	upgraded := make(chan error)
	go func() { upgraded <- lock.Upgrade(ctx) }()
	<-slow.holds
	mustErr(t, lock.Release(ctx), nil)
	mustBe(t, s.ask(t, "EXISTS", "book").(int64), 0)
	close(slow.letGo)
	mustErr(t, <-upgraded, ErrReleased)
	eventually(t, "nobody holds it", func() bool { return s.ask(t, "EXISTS", "book").(int64) == 0 })
}

// Else the late request would let readers in beside who has become a writer since.
func TestADowngradeThatMayStillArriveForbidsAnUpgrade(t *testing.T) {
	s, slow := startServer(t), newSlowNetwork()
	client := clientOf(t, s.redis(t, slow.dialer))
	lock := hold(t, client, "book")
	slow.word.Store("SHARED")
	limited, cancel := context.WithCancel(ctx)
	go func() { <-slow.holds; cancel() }()
	mustErr(t, lock.Downgrade(limited), context.Canceled) // and goes on
	mustErr(t, lock.Upgrade(ctx), ErrUnreachable)
	mustErr(t, lock.Err(), nil)
	close(slow.letGo)
	eventually(t, "it arrives", func() bool {
		return strings.Contains(s.redis(t).Info(ctx, "commandstats").Val(), "cmdstat_lock.acquire:calls=3,")
	})
	mustErr(t, lock.Downgrade(ctx), nil)
	mustErr(t, lock.Release(ctx), nil)
	mustBe(t, s.ask(t, "EXISTS", "book").(int64), 0)
}

func TestAnUpgradeThatIsNotAnsweredIsAskedForAgain(t *testing.T) {
	s, slow := startServer(t), newSlowNetwork()
	defer close(slow.letGo)
	lock := hold(t, clientOf(t, s.redis(t, slow.dialer)), "book", Shared())
	slow.word.Store("LOCK.ACQUIRE")
	mustErr(t, lock.Upgrade(ctx), nil)
	_, err := s.client(t).TryAcquire(ctx, "book", Shared())
	mustErr(t, err, ErrBusy)
	mustErr(t, lock.Release(ctx), nil)
}

func TestUpgradesThatAreCancelledAtAnyMomentKeepTheLock(t *testing.T) {
	s := startServer(t)
	client := s.client(t)
	lock := hold(t, client, "book")
	for round := range 300 {
		limited, cancel := context.WithCancel(ctx)
		timer := time.AfterFunc(time.Duration(round*5)*time.Microsecond, cancel)
		if err := lock.Upgrade(limited); err != nil && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		timer.Stop()
		cancel()
	}
	mustErr(t, lock.Renew(ctx), nil)
	mustErr(t, lock.Release(ctx), nil)
	mustBe(t, s.ask(t, "EXISTS", "book").(int64), 0)
}

func TestAReleaseBehindAChangeThatIsCancelledIsTheLastWord(t *testing.T) {
	s := startServer(t)
	client := s.client(t)
	for i := range 1000 {
		lock := hold(t, client, "book", Shared())
		within, cancel := context.WithTimeout(ctx, time.Duration(i%250)*3*time.Microsecond)
		_ = lock.Upgrade(within)
		cancel()
		mustErr(t, lock.Release(ctx), nil)
		mustBe(t, s.ask(t, "EXISTS", "book").(int64), 0)
		mustErr(t, lock.Upgrade(ctx), ErrReleased)
	}
}

func TestAContextThatHasEndedChangesNothing(t *testing.T) {
	s := startServer(t)
	lock := hold(t, s.client(t), "book")
	fence := lock.Fence()
	ended, cancel := context.WithCancel(ctx)
	cancel()
	mustErr(t, lock.Downgrade(ended), context.Canceled)
	mustErr(t, lock.Upgrade(ended), context.Canceled)
	time.Sleep(50 * time.Millisecond)
	mustBe(t, lock.Fence(), fence)
	mustBe(t, s.ask(t, "LOCK.ACQUIRE", "book", lock.Owner(), 1000).(int64), fence)
	mustErr(t, lock.Release(ctx), nil)
}

func TestAReleaseBehindAChangeReturnsInTimeFromAServerThatHangs(t *testing.T) {
	s := startServer(t)
	lock := hold(t, s.client(t), "book", Shared())
	s.signal(t, syscall.SIGSTOP)
	changed := make(chan error, 1)
	go func() { changed <- lock.Upgrade(ctx) }()
	eventually(t, "it is under way", func() bool {
		lock.e.client.mu.Lock()
		defer lock.e.client.mu.Unlock()
		return lock.e.changing != nil
	})
	began := time.Now()
	mustErr(t, lock.Release(ctx), ErrUnreachable)
	took := time.Since(began)
	s.signal(t, syscall.SIGCONT)
	if took > 5300*time.Millisecond {
		t.Fatal(took)
	}
	<-changed
	eventually(t, "it is released", func() bool { return s.ask(t, "EXISTS", "book").(int64) == 0 })
}
