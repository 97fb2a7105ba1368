// The agent of the Go helper for the conformance suite: it does what the lines on its standard input say. The messages
// are in clients/conformance/AGENTS.md.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
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

func (o object) text(field string) string { text, _ := o[field].(string); return text }

func (o object) number(field string) int64 { number, _ := o[field].(float64); return int64(number) }

// ms saturates, since a time.Duration ends at 292 years, but for what the module would not take.
func (o object) ms(field string) time.Duration {
	number := o.number(field)
	if number >= 1<<53 {
		return -1
	}
	return time.Duration(min(number, 1<<43)) * time.Millisecond
}

// key gives the bytes of a key: a character stands for each.
func key(text string) string {
	var bytes []byte
	for _, char := range text {
		bytes = append(bytes, byte(char))
	}
	return string(bytes)
}

var (
	mu      sync.Mutex // of all below
	clients = map[string]*lockkeeper.Client{}
	locks   = map[int64]*lockkeeper.Lock{}
	crowd   []*lockkeeper.Lock
	cancels = map[int64]context.CancelFunc{}
	errBody = errors.New("as asked")
)

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

// log writes what the helper logs as events.
type log struct{}

func (log) Write(line []byte) (int, error) {
	level := strings.Fields(string(line))[1]
	say(object{"event": "log", "level": strings.ToLower(strings.TrimPrefix(level, "level=")), "text": string(line)})
	return len(line), nil
}

func open(place object, label string) (*lockkeeper.Client, error) {
	o := redis.UniversalOptions{DB: int(place.number("db")), Username: place.text("user"), Password: place.text("password"),
		Protocol: max(int(place.number("resp")), 2), MasterName: place.text("master"), IsClusterMode: place.text("kind") == "cluster"}
	for _, address := range append(place.list("addresses"), place["unix"]) {
		if address != nil {
			o.Addrs = append(o.Addrs, address.(string))
		}
	}
	if authority := place.text("tls"); authority != "" {
		pem, _ := os.ReadFile(authority)
		o.TLSConfig = &tls.Config{RootCAs: x509.NewCertPool()}
		o.TLSConfig.RootCAs.AppendCertsFromPEM(pem)
	}
	handler := slog.NewTextHandler(log{}, &slog.HandlerOptions{Level: slog.LevelDebug})
	options := []lockkeeper.Option{lockkeeper.WithLogger(slog.New(handler))}
	if label != "" {
		options = append(options, lockkeeper.WithLabel(label))
	}
	return lockkeeper.New(redis.NewUniversalClient(&o), options...)
}

func (o object) list(field string) []any { list, _ := o[field].([]any); return list }

func (o object) options() (options []lockkeeper.Option) {
	for field, option := range map[string]lockkeeper.Option{
		"ttl_ms": lockkeeper.WithTTL(o.ms("ttl_ms")), "max_hold_ms": lockkeeper.WithMaxHold(o.ms("max_hold_ms")),
		"label": lockkeeper.WithLabel(o.text("label")), "min_replicas": lockkeeper.WithMinReplicas(int(o.number("min_replicas"))),
		"wait_ms": lockkeeper.WithWait(o.ms("wait_ms")), "limit": lockkeeper.WithLimit(int(o.number("limit"))),
		"shared": lockkeeper.Shared(),
	} {
		if o[field] != nil && o[field] != "forever" {
			options = append(options, option)
		}
	}
	if o["wait_ms"] == nil {
		options = append(options, lockkeeper.WithWait(0))
	}
	return options
}

// unlessZero gives null for what nobody told.
func unlessZero[T comparable](value T) any {
	var zero T
	if value == zero {
		return nil
	}
	return value
}

func state(lock *lockkeeper.Lock) object {
	s := object{"answer": "value", "remaining_us": lock.Remaining().Microseconds(), "lost": nil}
	var lost *lockkeeper.LostError
	if errors.As(lock.Err(), &lost) {
		s["lost"] = lost.Why
	}
	return s
}

// is gives the answer to whatever ended with this error; yes is what it is without one.
func is(yes string, err error) object {
	var lost *lockkeeper.LostError
	kind := "unreachable"
	switch {
	case err == nil:
		return object{"answer": yes}
	case errors.As(err, &lost):
		return object{"answer": "lost", "why": lost.Why}
	case errors.Is(err, lockkeeper.ErrBusy):
		return object{"answer": "busy"}
	case errors.Is(err, context.Canceled):
		return object{"answer": "cancelled"}
	case errors.Is(err, errBody):
		return object{"answer": "failed", "whose": "body"}
	case errors.Is(err, lockkeeper.ErrInvalid):
		kind = "invalid"
	case errors.Is(err, lockkeeper.ErrRefused):
		kind = "refused"
	}
	return object{"answer": "error", "kind": kind, "text": err.Error()}
}

func (o object) carryOut(ctx context.Context) object {
	mu.Lock()
	client, lock := clients[o.text("client")], locks[o.number("lock")]
	if strings.Contains("release_after leave drop", o.text("do")) {
		delete(locks, o.number("lock"))
	}
	mu.Unlock()
	switch what := o.text("do"); what {
	case "open":
		opened, err := open(o["place"].(map[string]any), o.text("label"))
		mu.Lock()
		defer mu.Unlock()
		clients[o.text("name")] = opened
		return is("ok", err)
	case "acquire":
		lock, err := client.Acquire(ctx, key(o.text("key")), o.options()...)
		if err != nil {
			return is("", err)
		}
		id := o.number("id")
		held := object{"answer": "held", "lock": id, "fence": lock.Fence(), "owner": lock.Owner(),
			// In this order: whoever is stopped in between must not seem to hold it for longer.
			"at": now(), "remaining_us": lock.Remaining().Microseconds()}
		mu.Lock()
		defer mu.Unlock()
		locks[id] = lock
		watched, _ := lock.Context(context.Background())
		context.AfterFunc(watched, func() {
			why := is("", context.Cause(watched))["why"]
			say(object{"event": "lost", "lock": id, "why": why})
		})
		return held
	case "cancel":
		mu.Lock()
		defer mu.Unlock()
		cancels[o.number("of")]()
	case "upgrade", "downgrade":
		ask := lock.Upgrade
		if what == "downgrade" {
			ask = lock.Downgrade
		}
		answer := is("yes", ask(ctx))
		if answer["answer"] == "yes" {
			answer["fence"], answer["remaining_us"] = lock.Fence(), lock.Remaining().Microseconds()
		}
		return answer
	case "renew":
		return is("yes", lock.Renew(ctx))
	case "extend":
		return is("yes", lock.Extend(ctx, o.ms("ms")))
	case "release", "release_after":
		return is("yes", lock.ReleaseAfter(ctx, o.ms("ms")))
	case "leave":
		lock.Leave()
	case "drop", "drop_many":
		mu.Lock()
		defer mu.Unlock()
		crowd = nil
		defer collect()
	case "remaining":
		return state(lock)
	case "info":
		info, err := client.Info(ctx, key(o.text("key")))
		answer := is("value", err)
		if answer["value"] = nil; info != nil {
			holders := []string{}
			for _, holder := range info.Holders {
				holders = append(holders, holder.Owner)
			}
			answer["value"] = object{"owner": unlessZero(info.Owner), "fence": unlessZero(info.Fence), "waiters": info.Waiters,
				"limit": unlessZero(info.Limit), "holding": info.Holding, "holders": holders}
		}
		return answer
	case "run":
		return o.run(ctx, client)
	case "many":
		return o.many(ctx, client)
	case "least":
		least, lost := time.Duration(1<<62), 0
		for _, lock := range crowd {
			if least = min(least, lock.Remaining()); lock.Err() != nil {
				lost++
			}
		}
		return object{"answer": "value", "remaining_us": least.Microseconds(), "lost": lost}
	case "block":
		for end := time.Now().Add(o.ms("ms")); time.Now().Before(end); {
			if o.text("how") == "sleep" {
				_ = unix.Nanosleep(&unix.Timespec{Sec: 1}, nil) // keeps its thread
			}
		}
		states := object{}
		for id, lock := range locks {
			states[fmt.Sprint(id)] = state(lock)
		}
		return object{"answer": "value", "locks": states}
	case "settled", "close":
		if o["limit_ms"] == nil {
			o["limit_ms"] = 60_000.0
		}
		return leave(what, o.ms("limit_ms"))
	default:
		return is("", fmt.Errorf("%w: no such message: %s", lockkeeper.ErrInvalid, what))
	}
	return object{"answer": "ok"}
}

// collect drops what nobody refers to, as the collector would some time.
func collect() {
	for range 3 {
		runtime.GC()
		time.Sleep(5 * time.Millisecond)
	}
}

func leave(what string, limit time.Duration) object {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	for _, client := range clients {
		end := client.Settled
		if what == "close" {
			end = client.Close
		}
		if end(ctx) != nil {
			return object{"answer": "no"}
		}
	}
	return object{"answer": "yes"}
}

func (o object) run(ctx context.Context, client *lockkeeper.Client) (answer object) {
	defer func() {
		if recover() != nil {
			answer = is("", errBody)
		}
	}()
	return is("done", client.Do(ctx, key(o.text("key")), func(ctx context.Context, _ *lockkeeper.Lock) error {
		tell := func(how string) { say(object{"event": "body", "of": o["id"], "how": how}) }
		tell("began")
		if o.text("body") == "nest" {
			if _, err := client.TryAcquire(ctx, key(o.text("key"))); !errors.Is(err, lockkeeper.ErrBusy) {
				return fmt.Errorf("nested: %v", err)
			}
		}
		select {
		case <-ctx.Done():
			tell("cancelled")
			return ctx.Err()
		case <-time.After(o.ms("ms")):
		}
		tell("ended")
		switch o.text("body") {
		case "fail":
			return errBody
		case "panic":
			panic(errBody)
		}
		return nil
	}, o.options()...))
}

func (o object) many(ctx context.Context, client *lockkeeper.Client) object {
	var group sync.WaitGroup
	for number := range o.number("count") {
		group.Add(1)
		go func() {
			defer group.Done()
			if lock, err := client.Acquire(ctx, fmt.Sprint(o.text("prefix"), number), o.options()...); err == nil {
				mu.Lock()
				defer mu.Unlock()
				crowd = append(crowd, lock)
			}
		}()
		if number%100 == 99 {
			group.Wait()
		}
	}
	group.Wait()
	return object{"answer": "held", "count": len(crowd)}
}

func main() {
	say(object{"hello": "go", "library": "go-redis " + redis.Version(), "version": runtime.Version(), "pid": os.Getpid(),
		"clock": now(), "can": []string{"cancel", "cancel_at_any_moment", "cancel_body", "drop", "hang_up", "panic"}})
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		message := object{}
		_ = json.Unmarshal(lines.Bytes(), &message)
		if message.text("how") == "exit" {
			os.Exit(0)
		}
		if message.text("do") == "end" {
			break
		}
		ctx, cancel := context.WithCancel(context.Background())
		mu.Lock()
		cancels[message.number("id")] = cancel
		mu.Unlock()
		if message["cancel_after_us"] != nil {
			time.AfterFunc(time.Duration(message.number("cancel_after_us"))*time.Microsecond, cancel)
		}
		go func() {
			answer := message.carryOut(ctx)
			answer["re"] = message["id"]
			say(answer)
		}()
	}
	leave("close", 5*time.Second)
}
