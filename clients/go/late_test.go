package lockkeeper

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// proxy stands before a server, and can hold back what was sent on the connections that are open by then.
type proxy struct {
	net.Listener
	mu    sync.Mutex
	gates []*sync.RWMutex
}

func startProxy(t *testing.T, to *server) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	mustErr(t, err, nil)
	p := &proxy{Listener: listener}
	var group sync.WaitGroup
	group.Add(1)
	go func() {
		defer group.Done()
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", to.addr)
			if err != nil {
				near.Close()
				continue
			}
			gate := &sync.RWMutex{}
			p.mu.Lock()
			p.gates = append(p.gates, gate)
			p.mu.Unlock()
			group.Add(2)
			go func() {
				defer group.Done()
				_, _ = io.Copy(near, far)
				near.Close()
			}()
			go func() {
				defer group.Done()
				chunk := make([]byte, 4096)
				for {
					n, err := near.Read(chunk)
					gate.RLock()
					_, _ = far.Write(chunk[:n])
					gate.RUnlock()
					if err != nil {
						_ = far.(*net.TCPConn).CloseWrite()
						return
					}
				}
			}()
		}
	}()
	t.Cleanup(func() {
		listener.Close()
		group.Wait()
	})
	return p
}

// hold holds back what is sent until the returned function is called.
func (p *proxy) hold() (letGo func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	held := p.gates
	for _, gate := range held {
		gate.Lock()
	}
	return func() {
		for _, gate := range held {
			gate.Unlock()
		}
	}
}

// Trap 23 and 5: a RELEASE over another connection overtakes the request, so another stands behind that.
func TestARequestThatArrivesAfterItWasCancelledLeavesNothing(t *testing.T) {
	s := startServer(t)
	p := startProxy(t, s)
	client := clientOf(t, s.redis(t, func(o *redis.Options) { o.Addr = p.Addr().String() }), WithTTL(10*time.Minute))
	mustErr(t, hold(t, client, "book").Release(ctx), nil)
	letGo := p.hold()
	limited, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	_, err := client.TryAcquire(limited, "book")
	mustErr(t, err, context.DeadlineExceeded)
	patient, stop := context.WithTimeout(ctx, patience)
	defer stop()
	mustErr(t, client.Settled(patient), nil)
	letGo()
	eventually(t, "it has arrived", func() bool {
		return strings.Contains(s.redis(t).Info(ctx, "commandstats").Val(), "cmdstat_lock.acquire:calls=2,")
	})
	eventually(t, "it is released", func() bool { return s.ask(t, "EXISTS", "book").(int64) == 0 })
}

// Trap 5: nor can a RELEASE behind the request be relied on alone.
func TestAWaitThatIsCancelledWhileItsConnectionHangsLeavesNoPlace(t *testing.T) {
	s := startServer(t)
	p := startProxy(t, s)
	holder := hold(t, s.client(t), "book")
	client := clientOf(t, s.redis(t, func(o *redis.Options) { o.Addr = p.Addr().String() }))
	limited, cancel := context.WithCancel(ctx)
	returned := make(chan error)
	go func() {
		_, err := client.Acquire(limited, "book")
		returned <- err
	}()
	eventually(t, "it waits", func() bool { return s.waiters(t, "book") == 1 })
	letGo := p.hold()
	defer letGo()
	cancel()
	mustErr(t, <-returned, context.Canceled)
	eventually(t, "its place is given up", func() bool { return s.waiters(t, "book") == 0 })
	mustErr(t, holder.Release(ctx), nil)
}

// Trap 23: nor does go-redis return from a blocked write, or while it logs in.
func TestARequestThatDoesNotLeaveEndsByItsContext(t *testing.T) {
	s := startServer(t)
	atSocket := s.redis(t, func(o *redis.Options) { o.Addr = s.socket })
	writes, logsIn := clientOf(t, atSocket), clientOf(t, atSocket)
	mustErr(t, hold(t, writes, "book").Release(ctx), nil)
	s.signal(t, syscall.SIGSTOP)
	defer s.signal(t, syscall.SIGCONT)
	large := strings.Repeat("x", 1<<20) // more than the system takes for a server that does not read
	for what, client := range map[string]*Client{"writes": writes, "logs in": logsIn} {
		limited, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
		defer cancel()
		began := time.Now()
		_, err := client.TryAcquire(limited, large)
		mustErr(t, err, context.DeadlineExceeded)
		if late := time.Since(began); late > 2*time.Second {
			t.Error(what, late) // it is given up after 2.5 s anyway
		}
	}
}

// candid tells whether it was closed before its other end was.
type candid struct {
	net.Conn
	ended, early, closed *atomic.Bool
}

func (c candid) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if errors.Is(err, io.EOF) {
		c.ended.Store(true)
	}
	return n, err
}

func (c candid) Close() error {
	c.early.Store(!c.ended.Load())
	c.closed.Store(true)
	return c.Conn.Close()
}

func (c candid) CloseWrite() error { return c.Conn.(*net.TCPConn).CloseWrite() }

// Trap 5: else what the server still says is answered with a reset, which overtakes the RELEASE.
func TestAConnectionIsReadUntilTheServerHasClosedIt(t *testing.T) {
	s := startServer(t)
	c := candid{ended: &atomic.Bool{}, early: &atomic.Bool{}, closed: &atomic.Bool{}}
	client := clientOf(t, s.redis(t, func(o *redis.Options) {
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			raw, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			if err != nil || c.Conn != nil {
				return raw, err
			}
			c.Conn = raw
			return c, nil
		}
	}))
	mustErr(t, hold(t, client, "book").Release(ctx), nil)
	s.signal(t, syscall.SIGSTOP)
	limited, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	_, err := client.TryAcquire(limited, "book")
	s.signal(t, syscall.SIGCONT)
	mustErr(t, err, context.DeadlineExceeded)
	eventually(t, "it is closed", c.closed.Load)
	mustBe(t, c.early.Load(), false)
}

// impatient cancels something as soon as a reply is read.
type impatient struct {
	net.Conn
	cancel *atomic.Pointer[context.CancelFunc]
}

func (c impatient) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if cancel := c.cancel.Swap(nil); cancel != nil {
		(*cancel)()
	}
	return n, err
}

// Else the cut would end the question of whoever uses it next.
func TestAConnectionThatIsAboutToBeCutIsNotUsedAgain(t *testing.T) {
	s, cancel := startServer(t), &atomic.Pointer[context.CancelFunc]{}
	client := clientOf(t, s.redis(t, func(o *redis.Options) {
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			raw, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			return impatient{raw, cancel}, err
		}
	}))
	node := client.place.single
	for range 100 {
		_, err := node.ask(ctx, now()+longestAttempt, nil, infoCommand("book"))
		mustErr(t, err, nil)
		mustBe(t, len(node.idle), 1)
		limited, stop := context.WithCancel(ctx)
		cancel.Store(&stop)
		_, _ = node.ask(limited, now()+longestAttempt, nil, infoCommand("book"))
		mustBe(t, len(node.idle), 0)
	}
}

// Trap 24: timers stand still while the machine is suspended, the clock does not.
func TestALossIsToldSoonAfterTheMachineWasSuspended(t *testing.T) {
	s := startServer(t)
	lock := hold(t, s.client(t), "book", WithTTL(time.Hour))
	const suspended = 2 * 60 * 60 * second
	c, e := lock.e.client, lock.e
	eventually(t, "the watchdog sleeps", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.looksAt > e.at {
			return false
		}
		// As if the clock had gone on: no timer knows of it.
		e.at -= suspended
		e.lease.endsAt -= suspended
		e.lease.dueAt -= suspended
		e.endsAt.Store(e.lease.endsAt)
		return true
	})
	mustLose(t, lock, Expired)
}

func TestTheClockIsBelievedBeforeTheWatchdog(t *testing.T) {
	s := startServer(t)
	lock := hold(t, s.client(t), "book")
	lock.e.client.mu.Lock() // so the watchdog cannot run
	lock.e.lease.endsAt = now()
	lock.e.endsAt.Store(lock.e.lease.endsAt)
	mustBe(t, lock.Remaining(), 0)
	lock.e.client.mu.Unlock()
	mustErr(t, lock.Err(), ErrLost)
	mustErr(t, lock.Release(ctx), ErrLost)
}

func TestALockThatIsGrantedWhileItsClientClosesIsGivenBack(t *testing.T) {
	s, slow := startServer(t), newSlowNetwork()
	client := clientOf(t, s.redis(t, slow.dialer), WithTTL(10*time.Minute))
	slow.word.Store("LOCK.ACQUIRE")
	asked := make(chan error)
	go func() {
		_, err := client.TryAcquire(ctx, "book")
		asked <- err
	}()
	<-slow.holds
	closed := make(chan error)
	go func() {
		limited, cancel := context.WithTimeout(ctx, patience/2)
		defer cancel()
		closed <- client.Close(limited)
	}()
	eventually(t, "it closes", func() bool {
		client.mu.Lock()
		defer client.mu.Unlock()
		return client.closed
	})
	close(slow.letGo)
	mustErr(t, <-asked, ErrInvalid)
	mustErr(t, <-closed, nil)
	mustBe(t, s.ask(t, "EXISTS", "book").(int64), 0)
}
