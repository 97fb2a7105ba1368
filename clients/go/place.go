package lockkeeper

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

const (
	// keep is how long a connection is kept that nobody needs: a fresh one costs a handshake, HELLO, AUTH, SELECT.
	keep = 10 * time.Second

	// mostQuestions may be under way on one node, waits and renewals not counted: each has a connection.
	mostQuestions = 32
)

// node is one server, or whichever is the master now: where our connections to it come from.
type node struct {
	options   redis.Options
	name      string // of our connections in CLIENT LIST
	questions chan struct{}
	renewals  chan struct{}

	mu      sync.Mutex
	idle    []*connection // the last was used last
	busy    int           // dials under way, and connections that are read to their end
	reached bool          // whether it ever answered: one that never did is most likely a wrong address
}

// newNode makes connections from the settings of the user's client, but with our limits and no retries. Only what
// says where the server is and who we are is taken over, so that nothing a later go-redis learns can change ours.
func newNode(from *redis.Options, addr, name string) *node {
	return &node{name: name, questions: make(chan struct{}, mostQuestions), renewals: make(chan struct{}, 1), options: redis.Options{
		Network: from.Network, Addr: addr, Dialer: from.Dialer, TLSConfig: from.TLSConfig, OnConnect: from.OnConnect,
		Protocol: from.Protocol, DB: from.DB, Username: from.Username, Password: from.Password,
		CredentialsProvider:          from.CredentialsProvider,
		CredentialsProviderContext:   from.CredentialsProviderContext,
		StreamingCredentialsProvider: from.StreamingCredentialsProvider,

		MaxRetries: -1, // it is for us to say whether a lock is asked for again
		// The pool is for one connection; at a limit of one, a failed handshake would make it dial in the background.
		PoolSize: 2, ConnMaxIdleTime: -1, ReadBufferSize: 4096, WriteBufferSize: 4096,
		DisableIdentity:          true, // CLIENT SETINFO would cost two commands a connection
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}}
}

func (n *node) String() string {
	if n.options.Addr == "FailoverClient" {
		return "the master"
	}
	return n.options.Addr
}

// dial gives a fresh connection that has logged in, after 5 s at the latest.
func (n *node) dial() (*connection, error) {
	ctx, cancel := context.WithTimeout(context.Background(), longestAttempt*time.Microsecond)
	defer cancel()
	raw, err := n.options.Dialer(ctx, n.options.Network, n.options.Addr)
	if err != nil {
		return nil, err
	}
	c := &connection{Conn: raw, raw: raw, node: n}
	options := n.options
	options.Dialer = func(context.Context, string, string) (net.Conn, error) { return c, nil }
	c.client = redis.NewClient(&options)
	c.redis = c.client.Conn()
	c.limit(now() + longestAttempt)
	// Logs in first. Who may not name the connection may still use it.
	if err := c.redis.ClientSetName(ctx, n.name).Err(); err != nil && !has(err, "NOPERM") {
		c.giveUp(nil)
		return nil, err
	}
	n.mu.Lock()
	n.reached = true
	n.mu.Unlock()
	return c, nil
}

// connect gives a connection that was used before, or a fresh one. One that is not there in time is there for
// the next who asks: a handshake may take longer than an attempt. Meanwhile that one dials as well, since it may hang.
func (n *node) connect(ctx context.Context, until int64) (*connection, error) {
	if c := n.takeIdle(); c != nil {
		return c, nil
	}
	dialled := make(chan *connection)
	failed := make(chan error, 1)
	gone := make(chan struct{})
	defer close(gone)
	n.begin()
	go func() {
		defer n.end()
		c, err := n.dial()
		if err != nil {
			failed <- err
			return
		}
		select {
		case dialled <- c:
		case <-gone:
			n.give(c)
		}
	}()
	timeout := after(until)
	defer timeout.Stop()
	select {
	case c := <-dialled:
		return c, nil
	case err := <-failed:
		if _, ok := refusal(err); ok {
			return nil, n.failed(err)
		}
		return nil, n.failed(unreachable(n.String(), err))
	case <-ctx.Done():
		return nil, n.failed(unreachable(n.String(), ctx.Err()))
	case <-timeout.C:
		return nil, n.failed(unreachable(n.String(), "no connection in time"))
	}
}

// failed is the error of a question that was not sent.
func (n *node) failed(err error) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return &failure{error: err, unsent: true, noServer: !n.reached}
}

// askInTurn is for all who ask by themselves, and there may be many at once.
func (n *node) askInTurn(
	ctx context.Context, asking bool, until int64, minReplicas int, undo command, commands ...command,
) ([]*redis.Cmd, error) {
	select {
	case n.questions <- struct{}{}:
	default:
		timeout := after(until)
		defer timeout.Stop()
		select {
		case n.questions <- struct{}{}:
		case <-ctx.Done():
			return nil, n.failed(unreachable(n.String(), ctx.Err()))
		case <-timeout.C:
			return nil, n.failed(unreachable(n.String(), "too many questions are under way"))
		}
	}
	defer func() { <-n.questions }()
	return n.question(ctx, asking, until, minReplicas, undo, commands...)
}

// renew sends renewals one batch after the other, so over one connection, unless the one before is not answered soon.
func (n *node) renew(asking bool, until int64, minReplicas int, commands ...command) ([]*redis.Cmd, error) {
	soon := after(now() + min(100*millisecond, (until-now())/2))
	defer soon.Stop()
	select {
	case n.renewals <- struct{}{}:
		defer func() { <-n.renewals }()
	case <-soon.C:
	}
	return n.question(context.Background(), asking, until, minReplicas, nil, commands...)
}

// question asks, with ASKING before each command if the node wants to hear it. With minReplicas a WAIT follows, and a
// yes counts only if so many replicas acknowledged it.
func (n *node) question(
	ctx context.Context, asking bool, until int64, minReplicas int, undo command, commands ...command,
) ([]*redis.Cmd, error) {
	if !asking && minReplicas == 0 {
		return n.ask(ctx, until, undo, commands...)
	}
	var all []command
	for _, each := range commands {
		if asking {
			all = append(all, command{"ASKING"})
		}
		all = append(all, each)
	}
	if minReplicas > 0 {
		all = append(all, replicasCommand(minReplicas, until-now()))
	}
	answers, err := n.ask(ctx, until, undo, all...)
	if err != nil {
		return nil, err
	}
	var shortfall error
	if minReplicas > 0 {
		shortfall = readReplicas(answers[len(answers)-1], minReplicas)
		answers = answers[:len(answers)-1]
	}
	var replies []*redis.Cmd
	for i, reply := range answers {
		if asking && i%2 == 0 {
			continue
		}
		if number, ok := reply.Val().(int64); ok && number > 0 && shortfall != nil {
			reply.SetErr(shortfall)
		}
		replies = append(replies, reply)
	}
	return replies, nil
}

// ask sends the commands on a connection that they have for themselves meanwhile. Should nobody answer in time, undo
// is sent behind them. Replies with an error are no error here, but no connection is kept to who is not the master.
func (n *node) ask(ctx context.Context, until int64, undo command, questions ...command) ([]*redis.Cmd, error) {
	c, err := n.connect(ctx, until)
	if err != nil {
		return nil, err
	}
	return n.askOn(ctx, c, until, undo, questions...)
}

func (n *node) askOn(ctx context.Context, c *connection, until int64, undo command, questions ...command) ([]*redis.Cmd, error) {
	replies, err := c.exchange(ctx, until, questions...)
	if err != nil {
		silent := isTimeout(err) && !errors.Is(context.Cause(ctx), errGranted)
		if !silent {
			undo = nil // the server has ended the connection, and with it a wait
		}
		c.giveUp(undo)
		if silent {
			err = errors.New("no answer in time")
		}
		return nil, &failure{error: unreachable(n.String(), err), silent: silent}
	}
	for _, reply := range replies {
		if has(reply.Err(), elsewhere) {
			c.giveUp(nil)
			n.closeIdle(time.Now())
			return replies, nil
		}
	}
	n.give(c)
	return replies, nil
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

// after fires at a time by our clock.
func after(at int64) *time.Timer {
	return time.NewTimer(time.Duration(at-now()) * time.Microsecond)
}

func (n *node) takeIdle() *connection {
	n.mu.Lock()
	defer n.mu.Unlock()
	for len(n.idle) > 0 {
		c := n.idle[len(n.idle)-1]
		n.idle = n.idle[:len(n.idle)-1]
		if c.isAlive() {
			return c
		}
		c.giveUp(nil)
	}
	return nil
}

func (n *node) give(c *connection) {
	n.mu.Lock()
	defer n.mu.Unlock()
	c.usedAt = time.Now()
	if c.isCut() {
		c.giveUp(nil)
		return
	}
	n.idle = append(n.idle, c)
}

// closeIdle closes what has not been used since then, and tells whether nothing is left.
func (n *node) closeIdle(since time.Time) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	for len(n.idle) > 0 && !n.idle[0].usedAt.After(since) {
		n.idle[0].giveUp(nil)
		n.idle = n.idle[1:]
	}
	return len(n.idle) == 0 && n.busy == 0
}

func (n *node) begin() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.busy++
}

func (n *node) end() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.busy--
}

// place is where the keys of one client live.
type place struct {
	name    string
	single  *node
	cluster *redis.ClusterClient

	infoRefused atomic.Bool // LOCK.INFO was, so nobody asks it again and again
	isMapKnown  atomic.Bool // of the cluster, to the client

	mu        sync.Mutex
	nodes     map[string]*node
	redirects map[string]redirect
}

type redirect struct {
	node   *node
	asking bool
}

func newPlace(client redis.UniversalClient, label string) (*place, error) {
	printable := func(r rune) rune {
		if r > ' ' && r <= '~' {
			return r
		}
		return '_'
	}
	p := &place{name: "lockkeeper:" + strings.Map(printable, label), nodes: map[string]*node{}, redirects: map[string]redirect{}}
	switch client := client.(type) {
	case *redis.Client:
		if client != nil {
			options := client.Options()
			p.single = p.nodeAt(options, options.Addr)
			return p, nil
		}
	case *redis.ClusterClient:
		if client != nil {
			p.cluster = client
			return p, nil
		}
	}
	return nil, fmt.Errorf("%w: a *redis.Client or *redis.ClusterClient is needed, got %T", ErrInvalid, client)
}

func (p *place) String() string {
	if p.single != nil {
		return p.single.String()
	}
	return "the cluster"
}

func (p *place) nodeAt(options *redis.Options, addr string) *node {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.nodes[addr] == nil {
		p.nodes[addr] = newNode(options, addr, p.name)
	}
	return p.nodes[addr]
}

// route gives the node that answers for the key now, and whether it wants to hear ASKING first.
func (p *place) route(ctx context.Context, key string, until int64) (redirect, error) {
	if p.single != nil {
		return redirect{node: p.single}, nil
	}
	p.mu.Lock()
	to, ok := p.redirects[key]
	delete(p.redirects, key) // once: by then the client has learnt the new map
	p.mu.Unlock()
	if ok {
		return to, nil
	}
	master, err := p.masterOf(ctx, key, until)
	if err != nil {
		return redirect{}, &failure{error: unreachable("the cluster", err), unsent: true, noServer: true}
	}
	options := master.Options()
	return redirect{node: p.nodeAt(options, options.Addr)}, nil
}

// masterOf asks the client, which asks its nodes when it is first used, and takes its own time for that.
func (p *place) masterOf(ctx context.Context, key string, until int64) (*redis.Client, error) {
	if p.isMapKnown.Load() {
		return p.cluster.MasterForKey(ctx, key)
	}
	type answer struct {
		master *redis.Client
		err    error
	}
	answered := make(chan answer, 1)
	go func() {
		master, err := p.cluster.MasterForKey(context.WithoutCancel(ctx), key)
		if err == nil {
			p.isMapKnown.Store(true)
		}
		answered <- answer{master, err}
	}()
	timer := after(until)
	defer timer.Stop()
	select {
	case a := <-answered:
		return a.master, a.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-timer.C:
		return nil, errors.New("no node tells its map in time")
	}
}

// failed: a node could not answer for this key. Next time it may be another.
func (p *place) failed(key string, from *node, err error) (redirected bool) {
	if _, refused := refusal(err); p.cluster == nil || refused && !has(err, elsewhere+" ASK CLUSTERDOWN MOVED") {
		return false
	}
	p.cluster.ReloadState(context.Background())
	line, _ := refusal(err)
	words := strings.Fields(line)
	if !has(err, "MOVED ASK") || len(words) != 3 {
		return false
	}
	addr := words[2]
	if strings.HasPrefix(addr, ":") { // a server that does not know its own name
		host, _, _ := net.SplitHostPort(from.options.Addr)
		addr = net.JoinHostPort(host, addr[1:])
	}
	to := redirect{p.nodeAt(&from.options, addr), words[0] == "ASK"}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.redirects[key] = to
	return true
}

// closeIdle closes what has not been used since then, everywhere, and tells whether nothing is left.
func (p *place) closeIdle(since time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	none := true
	for _, n := range p.nodes {
		none = n.closeIdle(since) && none
	}
	return none
}
