package lockkeeper

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// aSection holds a lock that another waits for.
func aSection(t *testing.T, client *Client, key string) {
	t.Helper()
	lock := hold(t, client, key)
	granted := make(chan error)
	go func() {
		second, err := client.Acquire(ctx, key)
		if err == nil {
			err = second.Release(ctx)
		}
		granted <- err
	}()
	eventually(t, "it waits", func() bool {
		info, err := client.Info(ctx, key)
		mustErr(t, err, nil)
		return info.Waiters == 1
	})
	mustErr(t, lock.Renew(ctx), nil)
	mustErr(t, lock.Release(ctx), nil)
	mustErr(t, <-granted, nil)
}

func TestAUnixSocketAUserADatabaseAndEitherProtocolAreUsed(t *testing.T) {
	s := startServer(t)
	s.ask(t, "ACL", "SETUSER", "app", "on", ">secret", "~*", "+@all")
	s.ask(t, "ACL", "SETUSER", "default", "off")
	for _, protocol := range []int{2, 3} {
		rdb := redis.NewClient(&redis.Options{Addr: s.socket, Username: "app", Password: "secret", DB: 3, Protocol: protocol})
		defer rdb.Close()
		client := clientOf(t, rdb)
		lock := hold(t, client, "book")
		if keys := rdb.Keys(ctx, "*").Val(); len(keys) != 1 {
			t.Fatal(keys)
		}
		mustErr(t, lock.Release(ctx), nil)
		aSection(t, client, "book")
	}
	wrong := redis.NewClient(&redis.Options{Addr: s.addr, Username: "app", Password: "guessed"})
	defer wrong.Close()
	_, err := clientOf(t, wrong).Acquire(ctx, "book")
	mustErr(t, err, ErrRefused)
}

func TestWhoMayNotLookWaitsAllTheSame(t *testing.T) {
	s := startServer(t)
	s.ask(t, "ACL", "SETUSER", "app", "on", ">secret", "~*", "+lock.acquire", "+lock.renew", "+lock.release", "+hello")
	client := clientOf(t, s.redis(t, func(o *redis.Options) { o.Username, o.Password = "app", "secret" }), WithTTL(3*time.Second))
	lock := hold(t, client, "book")
	granted := make(chan error)
	go func() {
		second, err := client.Acquire(ctx, "book")
		if err == nil {
			err = second.Release(ctx)
		}
		granted <- err
	}()
	time.Sleep(1500 * time.Millisecond)
	mustErr(t, lock.Release(ctx), nil)
	mustErr(t, <-granted, nil)
	stats := s.redis(t).Info(ctx, "commandstats").Val()
	if strings.Count(stats, "cmdstat_lock.acquire:calls=3,") != 1 {
		t.Fatalf("it did not wait in one piece: %s", stats)
	}
}

// run runs a program of the machine.
func run(t testing.TB, program string, arguments ...string) string {
	t.Helper()
	output, err := exec.Command(program, arguments...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v: %s", program, arguments, err, output)
	}
	return string(output)
}

func TestTLS(t *testing.T) {
	folder := t.TempDir()
	key, certificate := filepath.Join(folder, "key"), filepath.Join(folder, "certificate")
	run(t, "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2",
		"-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
	port := freePort()
	s := startServer(t, "--tls-port", fmt.Sprint(port), "--tls-cert-file", key[:len(key)-3]+"certificate", "--tls-key-file", key,
		"--tls-ca-cert-file", certificate, "--tls-auth-clients", "no")
	mustListen(t, fmt.Sprintf("127.0.0.1:%d", port)) // which it does after the other port
	pem, err := os.ReadFile(certificate)
	mustErr(t, err, nil)
	authorities := x509.NewCertPool()
	authorities.AppendCertsFromPEM(pem)
	rdb := redis.NewClient(&redis.Options{Addr: fmt.Sprintf("127.0.0.1:%d", port), TLSConfig: &tls.Config{RootCAs: authorities}})
	defer rdb.Close()
	client := clientOf(t, rdb)
	aSection(t, client, "book")
	lock := hold(t, client, "book")
	_, err = client.Acquire(ctx, "book", WithWait(20*time.Millisecond))
	mustErr(t, err, ErrBusy)
	cancelWait(t, s, client)
	mustErr(t, lock.Release(ctx), nil)
}

func startSentinel(t *testing.T, master *server) *server {
	t.Helper()
	port := freePort()
	file := filepath.Join(t.TempDir(), "sentinel.conf")
	host, at, _ := net.SplitHostPort(master.addr)
	text := fmt.Sprintf("port %d\nbind 127.0.0.1\nsentinel monitor m %s %s 1\nsentinel down-after-milliseconds m 1000\n"+
		"sentinel failover-timeout m 10000\n", port, host, at)
	mustErr(t, os.WriteFile(file, []byte(text), 0o600), nil)
	return startAt(t, port, file, "--sentinel")
}

func TestAMasterOfSentinelIsFoundAgainAfterAFailover(t *testing.T) {
	master := startServer(t)
	host, port, _ := net.SplitHostPort(master.addr)
	replica := startServer(t, "--replicaof", host+" "+port)
	sentinel := startSentinel(t, master)
	ask := redis.NewSentinelClient(&redis.Options{Addr: sentinel.addr})
	defer ask.Close()
	eventually(t, "the sentinel knows the replica", func() bool {
		replicas, err := ask.Replicas(ctx, "m").Result()
		return err == nil && len(replicas) == 1 && strings.Contains(replica.redis(t).Info(ctx, "replication").Val(), "master_link_status:up")
	})
	rdb := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: "m", SentinelAddrs: []string{sentinel.addr}})
	defer rdb.Close()
	client := clientOf(t, rdb)
	lock := hold(t, client, "book", WithTTL(20*time.Second), WithMinReplicas(1))
	granted := make(chan error)
	go func() {
		second, err := client.Acquire(ctx, "book", WithTTL(3*time.Second))
		if err == nil {
			err = second.Release(ctx)
		}
		granted <- err
	}()
	eventually(t, "it waits", func() bool { return master.waiters(t, "book") == 1 })
	master.signal(t, syscall.SIGSTOP)
	eventually(t, "who waits has gone where the master is", func() bool {
		return strings.Contains(replica.redis(t).Info(ctx, "replication").Val(), "role:master") && replica.waiters(t, "book") == 1
	})
	mustErr(t, lock.Err(), nil)
	mustErr(t, lock.Release(ctx), nil)
	mustErr(t, <-granted, nil)
	master.signal(t, syscall.SIGCONT)
}

func startCluster(t *testing.T, nodes int) []*server {
	t.Helper()
	var all []*server
	arguments := []string{"--cluster", "create"}
	for range nodes {
		port := freePort()
		s := startAt(t, port, "--loadmodule", module(t), "--cluster-enabled", "yes", "--cluster-config-file",
			filepath.Join(t.TempDir(), "nodes"), "--cluster-node-timeout", "2000")
		all = append(all, s)
		arguments = append(arguments, s.addr)
	}
	run(t, "redis-cli", append(arguments, "--cluster-yes")...)
	for _, s := range all {
		eventually(t, "the cluster is whole", func() bool {
			return strings.Contains(s.redis(t).ClusterInfo(ctx).Val(), "cluster_state:ok")
		})
	}
	return all
}

func TestAClusterThatIsNotThereIsUnreachableInTime(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0") // it accepts, and says nothing
	mustErr(t, err, nil)
	defer silent.Close()
	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{silent.Addr().String()}})
	defer rdb.Close()
	client := clientOf(t, rdb)
	start := time.Now()
	_, err = client.Acquire(ctx, "book", WithWait(300*time.Millisecond))
	mustErr(t, err, ErrUnreachable)
	limited, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	_, err = client.Acquire(limited, "book")
	mustErr(t, err, context.DeadlineExceeded)
	// go-redis takes 5 s for each.
	if took := time.Since(start); took < 600*time.Millisecond || took > 3*time.Second {
		t.Errorf("both took %v", took)
	}
}

func TestALockOfAClusterMovesWithItsSlot(t *testing.T) {
	nodes := startCluster(t, 3)
	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{nodes[0].addr}})
	defer rdb.Close()
	client := clientOf(t, rdb, WithTTL(3*time.Second))
	for i := range 5 {
		aSection(t, client, fmt.Sprint("book ", i))
	}
	lock := hold(t, client, "book")
	slot := rdb.ClusterKeySlot(ctx, "book").Val()
	from, err := rdb.MasterForKey(ctx, "book")
	mustErr(t, err, nil)
	to := nodes[0]
	if to.addr == from.Options().Addr {
		to = nodes[1]
	}
	host, port, _ := net.SplitHostPort(to.addr)
	id := func(addr string) string {
		return redisAt(t, addr).Do(ctx, "CLUSTER", "MYID").Val().(string)
	}
	fromID, toID := id(from.Options().Addr), id(to.addr)
	mustErr(t, redisAt(t, to.addr).Do(ctx, "CLUSTER", "SETSLOT", slot, "IMPORTING", fromID).Err(), nil)
	mustErr(t, from.Do(ctx, "CLUSTER", "SETSLOT", slot, "MIGRATING", toID).Err(), nil)
	mustErr(t, from.Migrate(ctx, host, port, "book", 0, 5*time.Second).Err(), nil)
	_, err = client.TryAcquire(ctx, "book") // by ASK
	mustErr(t, err, ErrBusy)
	time.Sleep(1500 * time.Millisecond)
	mustErr(t, lock.Err(), nil)
	for _, node := range nodes {
		mustErr(t, redisAt(t, node.addr).Do(ctx, "CLUSTER", "SETSLOT", slot, "NODE", toID).Err(), nil)
	}
	_, err = client.TryAcquire(ctx, "book") // by MOVED
	mustErr(t, err, ErrBusy)
	time.Sleep(3 * time.Second)
	mustErr(t, lock.Err(), nil)
	mustErr(t, lock.Release(ctx), nil)
}

func redisAt(t *testing.T, addr string) *redis.Client {
	t.Helper()
	return (&server{addr: addr}).redis(t)
}

func TestOnlyWhatEnoughReplicasAcknowledgedCounts(t *testing.T) {
	master := startServer(t)
	client := master.client(t, WithMinReplicas(1))
	_, err := client.TryAcquire(ctx, "book", WithTTL(10*time.Minute))
	mustErr(t, err, ErrRefused)
	if !strings.Contains(err.Error(), "NOREPLICAS") {
		t.Fatal(err)
	}
	eventually(t, "it is released", func() bool { return master.ask(t, "EXISTS", "book").(int64) == 0 })
	host, port, _ := net.SplitHostPort(master.addr)
	startServer(t, "--replicaof", host+" "+port)
	lock, err := client.Acquire(ctx, "book", WithWait(patience))
	mustErr(t, err, nil)
	aWait := make(chan error)
	go func() {
		second, err := client.Acquire(ctx, "book")
		if err == nil {
			err = second.Release(ctx)
		}
		aWait <- err
	}()
	eventually(t, "it waits", func() bool { return master.waiters(t, "book") == 1 })
	mustErr(t, lock.Release(ctx), nil)
	mustErr(t, <-aWait, nil)
}
