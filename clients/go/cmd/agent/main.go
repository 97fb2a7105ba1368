// The agent of the Go helper for the conformance suite: it does what the lines on its standard input say. The messages
// are in clients/conformance/AGENTS.md.
package main

import (
	"bufio"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sys/unix"

	lockkeeper "github.com/lockkeeper/lockkeeper/clients/go"
)

type object map[string]any

// message is what the agent was told, to be carried out until ctx is cancelled.
type message struct {
	object
	ctx context.Context
}

var (
	clients, locks, cancels sync.Map // by name, and by the id of a message

	messages = map[string]func(message) object{
		"open": message.open, "acquire": message.acquire, "run": message.run, "info": message.info,
		"settled": message.settled, "block": message.block, "drop": message.drop,
		"cancel":        func(m message) object { find[context.CancelFunc](&cancels, m.object["of"])(); return is(nil) },
		"remaining":     func(m message) object { return state(m.lock(), nil) },
		"renew":         func(m message) object { return state(m.lock(), m.lock().Renew(m.ctx)) },
		"extend":        func(m message) object { return state(m.lock(), m.lock().Extend(m.ctx, m.ms("ms"))) },
		"upgrade":       func(m message) object { return state(m.lock(), m.lock().Upgrade(m.ctx)) },
		"downgrade":     func(m message) object { return state(m.lock(), m.lock().Downgrade(m.ctx)) },
		"release":       func(m message) object { return is(m.take().Release(m.ctx)) },
		"release_after": func(m message) object { return is(m.take().ReleaseAfter(m.ctx, m.ms("ms"))) },
		"leave":         func(m message) object { m.take().Leave(); return is(nil) },
	}

	errBody = errors.New("as asked")
	words   = []struct {
		error
		word string
	}{
		{lockkeeper.ErrBusy, "busy"}, {context.Canceled, "cancelled"}, {errBody, "failed"}, {lockkeeper.ErrInvalid, "invalid"},
		{lockkeeper.ErrRefused, "refused"}, {lockkeeper.ErrUnreachable, "unreachable"}, {context.DeadlineExceeded, "no"},
	}
)

func find[T any](of *sync.Map, name any) T { found, _ := of.Load(name); return found.(T) }

func (o object) client() *lockkeeper.Client { return find[*lockkeeper.Client](&clients, o["client"]) }
func (o object) lock() *lockkeeper.Lock     { return find[*lockkeeper.Lock](&locks, o["lock"]) }
func (o object) take() *lockkeeper.Lock     { defer locks.Delete(o["lock"]); return o.lock() }
func (o object) text(field string) string   { text, _ := o[field].(string); return text }
func (o object) number(field string) int64  { number, _ := o[field].(float64); return int64(number) }

// ms saturates, since a time.Duration ends at 292 years, but for what the module would not take.
func (o object) ms(field string) time.Duration {
	number := o.number(field)
	if number >= 1<<53 {
		return -1
	}
	return time.Duration(min(number, 1<<43)) * time.Millisecond
}

// key gives the bytes of a key: a character stands for each.
func (o object) key() string {
	var bytes []byte
	for _, char := range o.text("key") {
		bytes = append(bytes, byte(char))
	}
	return string(bytes)
}

func now() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &t)
	return t.Sec*1e6 + t.Nsec/1000
}

// say writes one line at once, so that those of several goroutines do not mix.
func say(line object) {
	if line["at"] == nil {
		line["at"] = now()
	}
	text, _ := json.Marshal(line)
	_, _ = os.Stdout.Write(append(text, '\n'))
}

// is gives the answer to what ended with this error.
func is(err error) object {
	if err == nil {
		return object{"answer": "yes"}
	}
	if lost := (*lockkeeper.LostError)(nil); errors.As(err, &lost) {
		return object{"answer": "lost", "why": lost.Why}
	}
	for _, known := range words {
		if errors.Is(err, known.error) {
			return object{"answer": known.word, "text": err.Error()}
		}
	}
	return object{"answer": "unknown", "text": err.Error()}
}

// state tells of a lock, unless what was asked of it ended with an error.
func state(lock *lockkeeper.Lock, err error) object {
	if err != nil {
		return is(err)
	}
	// In this order: whoever is stopped in between must not seem to hold it for longer.
	return object{"answer": "yes", "at": now(), "remaining_us": lock.Remaining().Microseconds(),
		"lost": is(lock.Err())["why"], "fence": lock.Fence(), "owner": lock.Owner()}
}

func (m message) settled() object {
	ctx, cancel := context.WithTimeout(m.ctx, m.ms("ms"))
	defer cancel()
	return is(m.client().Settled(ctx))
}

func (m message) block() object {
	for end := time.Now().Add(m.ms("ms")); time.Now().Before(end); {
		if m.text("how") == "sleep" {
			_ = unix.Nanosleep(&unix.Timespec{Sec: 1}, nil) // keeps its thread
		}
	}
	return state(m.lock(), nil)
}

func (m message) drop() object {
	m.take()
	// What nobody refers to is found by the collector, some time.
	for range 3 {
		runtime.GC()
		time.Sleep(5 * time.Millisecond)
	}
	return is(nil)
}

func (m message) open() object {
	scheme, place, _ := strings.Cut(m.text("url"), "://")
	hosts, master, _ := strings.Cut(place, "/")
	var client redis.UniversalClient
	switch scheme {
	case "redis+cluster":
		client = redis.NewClusterClient(&redis.ClusterOptions{Addrs: strings.Split(hosts, ",")})
	case "redis+sentinel":
		client = redis.NewFailoverClient(&redis.FailoverOptions{SentinelAddrs: strings.Split(hosts, ","), MasterName: master})
	default:
		options, _ := redis.ParseURL(m.text("url"))
		if pem, err := os.ReadFile(m.text("tls")); err == nil {
			options.TLSConfig.RootCAs = x509.NewCertPool()
			options.TLSConfig.RootCAs.AppendCertsFromPEM(pem)
		}
		client = redis.NewClient(options)
	}
	opened, err := lockkeeper.New(client, m.options()...)
	clients.Store(m.object["name"], opened)
	return is(err)
}

func (o object) options() (options []lockkeeper.Option) {
	for field, option := range map[string]lockkeeper.Option{
		"ttl_ms": lockkeeper.WithTTL(o.ms("ttl_ms")), "max_hold_ms": lockkeeper.WithMaxHold(o.ms("max_hold_ms")),
		"label": lockkeeper.WithLabel(o.text("label")), "min_replicas": lockkeeper.WithMinReplicas(int(o.number("min_replicas"))),
		"wait_ms": lockkeeper.WithWait(o.ms("wait_ms")), "limit": lockkeeper.WithLimit(int(o.number("limit"))),
		"shared": lockkeeper.Shared(),
	} {
		if o[field] != nil {
			options = append(options, option)
		}
	}
	if isOneTry := o["key"] != nil && o["wait_ms"] == nil && o["forever"] == nil; isOneTry {
		options = append(options, lockkeeper.WithWait(0))
	}
	return options
}

func (m message) acquire() object {
	lock, err := m.client().Acquire(m.ctx, m.key(), m.options()...)
	if err != nil {
		return is(err)
	}
	held, id := state(lock, nil), m.object["id"]
	locks.Store(id, lock)
	watched, _ := lock.Context(context.Background())
	context.AfterFunc(watched, func() {
		say(object{"event": "lost", "lock": id, "why": is(context.Cause(watched))["why"]})
	})
	return held
}

func (m message) info() object {
	info, err := m.client().Info(m.ctx, m.key())
	answer := is(err)
	answer["info"] = info
	return answer
}

func (m message) run() object {
	return is(m.client().Do(m.ctx, m.key(), func(ctx context.Context, _ *lockkeeper.Lock) error {
		if _, err := m.client().TryAcquire(ctx, m.key()); !errors.Is(err, lockkeeper.ErrBusy) {
			return errors.New("who holds it was not told that it is busy")
		}
		say(object{"event": "began", "of": m.object["id"]})
		defer func() { say(object{"event": "ended", "of": m.object["id"]}) }()
		atMost, cancel := context.WithTimeout(ctx, m.ms("ms"))
		defer cancel()
		<-atMost.Done()
		if m.text("body") == "panic" {
			panic(errBody)
		}
		return map[string]error{"fail": errBody, "return": ctx.Err()}[m.text("body")]
	}, m.options()...))
}

func main() {
	slog.SetLogLoggerLevel(slog.LevelDebug)
	say(object{"event": "hello", "can": strings.Fields("block cancel cancel_at_any_moment cancel_body drop hang_up panic")})
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		ctx, cancel := context.WithCancel(context.Background())
		told := message{object{}, ctx}
		_ = json.Unmarshal(lines.Bytes(), &told.object)
		cancels.Store(told.object["id"], cancel)
		go func() {
			answer := is(errBody)
			defer func() {
				_ = recover()
				answer["re"] = told.object["id"]
				say(answer)
			}()
			answer = messages[told.text("do")](told)
		}()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	clients.Range(func(_, client any) bool { return client.(*lockkeeper.Client).Close(ctx) == nil })
}
