package lockkeeper

import "testing"

// What a section costs that nobody else wants, but for the time on the server and on the way to it.
func BenchmarkAcquireAndRelease(b *testing.B) {
	client := startServer(b).client(b)
	b.ReportAllocs()
	for b.Loop() {
		lock, err := client.Acquire(ctx, "book")
		mustErr(b, err, nil)
		mustErr(b, lock.Release(ctx), nil)
	}
}

// What it costs to hand the lock over to who waits for it.
func BenchmarkHandOver(b *testing.B) {
	s := startServer(b)
	client := s.client(b)
	lock := hold(b, client, "book")
	turns := make(chan *Lock)
	b.ReportAllocs()
	for b.Loop() {
		go func() {
			next, err := client.Acquire(ctx, "book")
			mustErr(b, err, nil)
			turns <- next
		}()
		b.StopTimer()
		eventually(b, "it waits", func() bool { return s.waiters(b, "book") == 1 })
		b.StartTimer()
		mustErr(b, lock.Release(ctx), nil)
		lock = <-turns
	}
	mustErr(b, lock.Release(ctx), nil)
}
