// Runs locks from Go, and prints as JSON what each client did, or what it cost.
//
//	go_locks VARIANT URL CLIENTS HOLD PAUSE LENGTH   clients are goroutines
//	go_locks VARIANT URL pairs PAIRS                 acquire and release of a free lock
//	go_locks helper URL kept LOCKS SECONDS           so many locks are held for so long
//
// All share one pool of connections; times are in seconds.
package main

import (
	"encoding/json"
	"fmt"
	"log"
	"os"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	lockkeeper "github.com/lockkeeper/lockkeeper/clients/go"
)

func newOwner() string { return uuid.NewString() }

func number(word string) float64 {
	number, err := strconv.ParseFloat(word, 64)
	must(err)
	return number
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	if len(os.Args) < 5 || variants[os.Args[1]] == nil {
		log.Fatal("usage: go_locks VARIANT URL CLIENTS HOLD PAUSE LENGTH | pairs PAIRS | kept LOCKS SECONDS")
	}
	options, err := redis.ParseURL(os.Args[2])
	must(err)
	// The lock is what is measured, not the patience of the client, nor its pool.
	options.ReadTimeout, options.PoolSize, options.ContextTimeoutEnabled = -1, 300, true
	rdb := redis.NewClient(options)
	must(rdb.Ping(background).Err())
	newLocker, err := variants[os.Args[1]](rdb)
	must(err)
	var result any
	switch words := os.Args[3:]; words[0] {
	case "pairs":
		result = pairs(rdb, newLocker(), int(number(words[1])))
	case "kept":
		result = kept(rdb, int(number(words[1])), number(words[2]))
	default:
		result = turns(newLocker, int(number(words[0])), number(words[1]), number(words[2]), number(words[3]))
	}
	must(json.NewEncoder(os.Stdout).Encode(result))
}

func pairs(rdb *redis.Client, lock locker, count int) map[string]float64 {
	var spent cost
	for range 2 { // cold, and warm
		before := costs(rdb)
		for range count {
			must(lock.acquire())
			must(lock.release())
		}
		spent = costs(rdb).since(before)
	}
	each := func(us float64) float64 { return us / float64(count) }
	return map[string]float64{"wall": each(spent.wall), "client_cpu": each(spent.client), "server_cpu": each(spent.server)}
}

func kept(rdb *redis.Client, count int, seconds float64) map[string]float64 {
	client, err := lockkeeper.New(rdb, lockkeeper.WithTTL(ttl))
	must(err)
	locks, start := make([]*lockkeeper.Lock, count), time.Now()
	for i := range locks {
		locks[i], err = client.TryAcquire(background, fmt.Sprint("kept:", i))
		must(err)
	}
	took, before := time.Since(start), costs(rdb)
	time.Sleep(time.Duration(seconds * float64(time.Second)))
	spent := costs(rdb).since(before)
	for _, lock := range locks {
		must(lock.Err())
	}
	return map[string]float64{"client": 100 * spent.client / spent.wall, "server": 100 * spent.server / spent.wall,
		"acquired": took.Seconds()}
}
