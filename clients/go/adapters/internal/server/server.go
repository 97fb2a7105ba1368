// Package server starts a redis-server with the module, for tests.
package server

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	lockkeeper "github.com/lockkeeper/lockkeeper/clients/go"
)

// Start gives clients of a server that ends with the test.
func Start(t *testing.T) (*redis.Client, *lockkeeper.Client) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := listener.Addr().(*net.TCPAddr).Port
	listener.Close()
	program, module := os.Getenv("LOCKKEEPER_TEST_SERVER"), os.Getenv("LOCKKEEPER_MODULE")
	if program == "" {
		program = "redis-server"
	}
	command := exec.Command(program, "--port", fmt.Sprint(port), "--save", "", "--dir", t.TempDir(), "--loadmodule", module)
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	rdb := redis.NewClient(&redis.Options{Addr: fmt.Sprintf("127.0.0.1:%d", port)})
	client, err := lockkeeper.New(rdb)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = client.Close(context.Background())
		_ = rdb.Close()
		_ = command.Process.Kill()
		_ = command.Wait()
	})
	for end := time.Now().Add(time.Minute); rdb.Ping(context.Background()).Err() != nil; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the server does not answer; is LOCKKEEPER_MODULE set?")
		}
	}
	return rdb, client
}
