package lockkeeper

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// patience is how long a test waits for what must happen, on a machine that is busy with other things.
const patience = 60 * time.Second

var ctx = context.Background()

// server is a redis-server of a test's own, with the module.
type server struct {
	addr, socket string
	process      *os.Process
	once         sync.Once
	asked        *redis.Client
}

func modulePath() string {
	path := os.Getenv("LOCKKEEPER_MODULE")
	if path == "" {
		path = "../../target/release/liblockkeeper.so"
	}
	path, _ = filepath.Abs(path)
	return path
}

func module(t testing.TB) string {
	t.Helper()
	if _, err := os.Stat(modulePath()); err != nil {
		t.Fatalf("build the module first, or set LOCKKEEPER_MODULE: %v", err)
	}
	return modulePath()
}

func startServer(t testing.TB, arguments ...string) *server {
	t.Helper()
	return startAt(t, freePort(), append([]string{"--loadmodule", module(t)}, arguments...)...)
}

func startAt(t testing.TB, port int, arguments ...string) *server {
	t.Helper()
	program := os.Getenv("LOCKKEEPER_TEST_SERVER")
	if program == "" {
		program = "redis-server"
	}
	folder := t.TempDir()
	s := &server{addr: fmt.Sprintf("127.0.0.1:%d", port), socket: filepath.Join(folder, "s")}
	command := exec.Command(program, append(arguments, "--port", fmt.Sprint(port), "--bind", "127.0.0.1", "--dir", folder,
		"--unixsocket", s.socket, "--save", "", "--logfile", filepath.Join(folder, "log"), "--enable-debug-command", "yes")...)
	if contains(arguments, "--sentinel") {
		command = exec.Command(program, arguments...)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	s.process = command.Process
	t.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait()
		if text, err := os.ReadFile(filepath.Join(folder, "log")); t.Failed() && err == nil {
			t.Logf("the server said: %s", text)
		}
	})
	mustListen(t, s.addr)
	return s
}

func mustListen(t testing.TB, addr string) {
	t.Helper()
	eventually(t, "the server listens", func() bool {
		connection, err := net.Dial("tcp", addr)
		if err == nil {
			connection.Close()
		}
		return err == nil
	})
}

func contains(words []string, word string) bool {
	for _, each := range words {
		if each == word {
			return true
		}
	}
	return false
}

// freePort is none that a client is given for its end of a connection: the system takes those from 32768 on. The bus of a
// node in a cluster is 10000 higher.
func freePort() int {
	for {
		port := 10000 + rand.IntN(12000)
		listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err == nil {
			listener.Close()
			return port
		}
	}
}

func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !is(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// redis is a client of go-redis: one for all questions of a test's own, or one that is changed for a helper.
func (s *server) redis(t testing.TB, change ...func(*redis.Options)) *redis.Client {
	t.Helper()
	if change == nil {
		s.once.Do(func() { s.asked = s.redis(t, func(*redis.Options) {}) })
		return s.asked
	}
	options := &redis.Options{Addr: s.addr}
	for _, each := range change {
		each(options)
	}
	client := redis.NewClient(options)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// ask puts a question of the test's own.
func (s *server) ask(t testing.TB, words ...any) any {
	t.Helper()
	reply, err := s.redis(t).Do(ctx, words...).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		t.Fatal(words, err)
	}
	return reply
}

func (s *server) signal(t testing.TB, signal syscall.Signal) {
	t.Helper()
	if err := s.process.Signal(signal); err != nil {
		t.Fatal(err)
	}
}

// ours are the connections of helpers.
func (s *server) ours(t testing.TB) int {
	t.Helper()
	return strings.Count(s.ask(t, "CLIENT", "LIST").(string), "name=lockkeeper:")
}

func (s *server) waiters(t testing.TB, key string) int64 {
	t.Helper()
	info, err := readInfo(s.redis(t).Do(ctx, "LOCK.INFO", key).Result())
	if err != nil {
		t.Fatal(err)
	}
	if info == nil {
		return 0
	}
	return info.Waiters
}

// client is a helper, which is closed with the test.
func (s *server) client(t testing.TB, options ...Option) *Client {
	t.Helper()
	return clientOf(t, s.redis(t), options...)
}

func clientOf(t testing.TB, rdb redis.UniversalClient, options ...Option) *Client {
	t.Helper()
	client, err := New(rdb, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		limited, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		if err := client.Close(limited); err != nil {
			t.Error(err)
		}
	})
	return client
}

func hold(t testing.TB, client *Client, key string, options ...Option) *Lock {
	t.Helper()
	lock, err := client.TryAcquire(ctx, key, options...)
	if err != nil {
		t.Fatal(err)
	}
	return lock
}

func mustErr(t testing.TB, found, expected error) {
	t.Helper()
	if !errors.Is(found, expected) {
		t.Fatalf("found %v, expected %v", found, expected)
	}
}

func mustLose(t testing.TB, lock *Lock, why Why) {
	t.Helper()
	select {
	case <-lock.Lost():
	case <-time.After(patience):
		t.Fatal("never lost")
	}
	var lost *LostError
	if !errors.As(lock.Err(), &lost) || lost.Why != why {
		t.Fatalf("found %v, expected %v", lock.Err(), why)
	}
}
