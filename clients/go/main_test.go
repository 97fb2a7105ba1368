package lockkeeper

import (
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// ExampleAddr is where the examples find their server.
var ExampleAddr string

// ExampleWorker is the variable in which a worker of an example finds it.
const ExampleWorker = "LOCKKEEPER_EXAMPLE_WORKER"

func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	end := startForExamples()
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		end()
		os.Exit(code)
	}))
}

func startForExamples() (end func()) {
	module, port, program := modulePath(), freePort(), os.Getenv("LOCKKEEPER_TEST_SERVER")
	if program == "" {
		program = "redis-server"
	}
	ExampleAddr = fmt.Sprintf("127.0.0.1:%d", port)
	server := exec.Command(program, "--port", fmt.Sprint(port), "--save", "", "--dir", os.TempDir(), "--loadmodule", module)
	if err := server.Start(); err != nil {
		panic(err)
	}
	for begun := time.Now(); time.Since(begun) < patience; time.Sleep(2 * time.Millisecond) {
		if connection, err := net.Dial("tcp", ExampleAddr); err == nil {
			connection.Close()
			break
		}
	}
	return func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	}
}
