package lockkeeper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

// connection is one connection of our own. go-redis logs in and speaks the protocol on it, but when a request ends
// is for us to say: go-redis can neither be interrupted, nor send anything behind a request that it gave up.
type connection struct {
	net.Conn // as go-redis sees it
	raw      net.Conn
	node     *node
	client   *redis.Client
	redis    *redis.Conn
	usedAt   time.Time

	mu     sync.Mutex
	cut    bool // nothing can be read or written by go-redis any more
	broken bool // a write failed, maybe in the middle
}

func (c *connection) Write(p []byte) (int, error) {
	n, err := c.raw.Write(p)
	if err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.broken = true
	}
	return n, err
}

// The deadlines of go-redis are not heeded: each is a call of the system, and [connection.limit] has set ours.

func (c *connection) SetDeadline(time.Time) error      { return nil }
func (c *connection) SetReadDeadline(time.Time) error  { return nil }
func (c *connection) SetWriteDeadline(time.Time) error { return nil }

// limit is until when what is written and read next may take.
func (c *connection) limit(until int64) {
	var deadline time.Time
	if until != forever {
		deadline = time.Now().Add(time.Duration(until-now()) * time.Microsecond)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.cut {
		_ = c.raw.SetDeadline(deadline)
	}
}

// Close does nothing: go-redis closes what it thinks is broken, on which we may have more to say.
func (c *connection) Close() error { return nil }

// interrupt makes go-redis return at once, from any goroutine. Once: what [connection.giveUp] still says must not be cut.
func (c *connection) interrupt() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.cut {
		c.cut = true
		_ = c.raw.SetDeadline(time.Unix(1, 0))
	}
}

func (c *connection) isCut() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cut
}

// exchange sends the commands in one pipeline and gives their replies. If the context ends first, or the time, both
// are told by the error, and the connection is only good for [connection.giveUp].
func (c *connection) exchange(ctx context.Context, until int64, commands ...command) ([]*redis.Cmd, error) {
	stop := context.AfterFunc(ctx, c.interrupt)
	c.limit(until)
	limitless := context.Background()
	var replies []*redis.Cmd
	if len(commands) == 1 {
		replies = []*redis.Cmd{c.redis.Do(limitless, commands[0]...)}
	} else {
		pipeline := c.redis.Pipeline()
		for _, each := range commands {
			replies = append(replies, pipeline.Do(limitless, each...))
		}
		_, _ = pipeline.Exec(limitless)
	}
	interrupted := !stop()
	for _, reply := range replies {
		err := reply.Err()
		if _, ok := refusal(err); err != nil && !ok && !errors.Is(err, redis.Nil) {
			return nil, err
		}
	}
	if interrupted {
		c.interrupt() // or it would be, while somebody else uses it
	}
	return replies, nil
}

// giveUp closes the connection. With a command, that is sent behind what was sent, and the connection is closed for
// sending, which also ends a wait; it is then read until the server has closed it too: closed at once it would
// answer what still comes with a reset, which overtakes what we have sent.
func (c *connection) giveUp(last command) {
	defer c.client.Close()
	c.interrupt()
	half, ok := c.raw.(interface{ CloseWrite() error })
	if last == nil || c.broken || !ok {
		_ = c.raw.Close()
		return
	}
	// Should its buffer be full, the server reads nothing: what is in it is not worth a wait.
	_ = c.raw.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	if _, err := c.raw.Write(encode(last)); err != nil || half.CloseWrite() != nil {
		_ = c.raw.Close()
		return
	}
	c.node.begin()
	go func() {
		defer c.node.end()
		_ = c.raw.SetReadDeadline(time.Now().Add(longestAttempt * time.Microsecond))
		_, _ = io.Copy(io.Discard, c.raw)
		_ = c.raw.Close()
	}()
}

func encode(words command) []byte {
	var line strings.Builder
	fmt.Fprintf(&line, "*%d\r\n", len(words))
	for _, word := range words {
		text := fmt.Sprint(word)
		fmt.Fprintf(&line, "$%d\r\n%s\r\n", len(text), text)
	}
	return []byte(line.String())
}

// isAlive tells whether a connection that nobody used still is one: what the server ended can be read.
func (c *connection) isAlive() bool {
	inner := c.raw
	if tls, ok := inner.(interface{ NetConn() net.Conn }); ok {
		inner = tls.NetConn()
	}
	socket, ok := inner.(syscall.Conn)
	if !ok {
		return true
	}
	raw, err := socket.SyscallConn()
	return err == nil && nothingToRead(raw)
}
