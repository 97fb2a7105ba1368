package lockkeeper

import (
	"context"
	"errors"
	"io"
	"net"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Trap 7: success is exactly 1, null is the error redis.Nil, and what is not understood is no answer.
func TestSuccessIsExactlyOne(t *testing.T) {
	for _, each := range []struct {
		reply    any
		err      error
		expected answer
	}{
		{int64(1), nil, yes}, {int64(0), nil, taken}, {nil, redis.Nil, gone},
		{"1", nil, failed}, {int64(2), nil, failed}, {int64(-1), nil, failed}, {true, nil, failed}, {1.0, nil, failed},
		{nil, nil, failed}, {"OK", nil, failed}, {[]any{int64(1)}, nil, failed}, {nil, io.EOF, failed},
	} {
		found, err := readAnswer(each.reply, each.err)
		if found != each.expected || (found == failed) != (err != nil) {
			t.Errorf("%v, %v: found %v, %v", each.reply, each.err, found, err)
		}
		fence, err := readFence(each.reply, each.err)
		if number, ok := each.reply.(int64); (fence != 0) != (ok && number > 0) || fence != 0 && err != nil {
			t.Errorf("%v, %v: found the fence %v, %v", each.reply, each.err, fence, err)
		}
	}
}

// announcesMuch finds a length of six digits and more, whatever it is the length of.
var announcesMuch = regexp.MustCompile(`[^:0-9][0-9]{6}`)

// FuzzReplies has go-redis and our readers read any bytes as the reply of a server.
func FuzzReplies(f *testing.F) {
	for _, seed := range []string{
		":1\r\n", ":0\r\n", "$-1\r\n", "_\r\n", ":1795986866264000\r\n", "-READONLY x\r\n", "+OK\r\n", "#t\r\n", ",1\r\n", "$1\r\n1\r\n",
		"*12\r\n$5\r\nowner\r\n$1\r\na\r\n$5\r\nfence\r\n:7\r\n$7\r\nheld-ms\r\n:1\r\n$6\r\nttl-ms\r\n:-1\r\n$7\r\nwaiters\r\n:0\r\n$5\r\nqueue\r\n*0\r\n",
		"%2\r\n$7\r\nwaiters\r\n:1\r\n$5\r\nqueue\r\n*1\r\n%1\r\n$5\r\nowner\r\n$1\r\nb\r\n", "*-1\r\n", ">2\r\n+x\r\n+y\r\n:1\r\n", "(1\r\n", "=5\r\ntxt:1\r\n",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, bytes []byte) {
		if announcesMuch.Match(bytes) {
			t.Skip("go-redis makes room for as much as a server announces")
		}
		reply, err := replyOf(t, bytes)
		text := string(bytes)
		answer, refused := readAnswer(reply, err)
		if (answer == failed) != (refused != nil) {
			t.Errorf("%q: %v, %v", text, answer, refused)
		}
		if answer == yes && !strings.Contains(text, ":1\r\n") && !strings.Contains(text, ":+1\r\n") && !strings.Contains(text, "1\r\n") {
			t.Errorf("%q is a yes", text)
		}
		if fence, refused := readFence(reply, err); fence < 0 || fence > 0 && refused != nil {
			t.Errorf("%q is the fence %d, %v", text, fence, refused)
		}
		info, _ := readInfo(reply, err)
		_ = info.knows("b")
	})
}

// replyOf is what go-redis reads from these bytes, at the end of which the connection ends.
func replyOf(t *testing.T, bytes []byte) (any, error) {
	ours, theirs := net.Pipe()
	client := redis.NewClient(&redis.Options{
		Dialer:   func(context.Context, string, string) (net.Conn, error) { return ours, nil },
		Protocol: 3, MaxRetries: -1, DialerRetries: 1, DisableIdentity: true, ReadTimeout: time.Second,
	})
	defer client.Close()
	go func() {
		defer theirs.Close()
		request := make([]byte, 1024)
		for _, reply := range [][]byte{[]byte("-ERR unknown command\r\n"), bytes} {
			if _, err := theirs.Read(request); err != nil {
				return
			}
			if _, err := theirs.Write(reply); err != nil {
				return
			}
		}
	}()
	reply, err := client.Do(ctx, "LOCK.RENEW").Result()
	if err != nil && errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	return reply, err
}
