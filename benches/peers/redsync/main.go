// Runs the locks of redsync, and prints what each client did.
//
//	redsync default|10ms URL CLIENTS HOLD PAUSE LENGTH
//
// Clients are goroutines, each with a connection of its own; times are in seconds.
package main

import (
	"context"
	"encoding/json"
	"log"
	"math/rand"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
)

type record struct {
	sync.Mutex
	turns        [][3]float64
	waitingSince *float64
}

func client(lock *redsync.Mutex, record *record, hold, pause float64, now func() float64) {
	for {
		asked := now()
		record.Lock()
		record.waitingSince = &asked
		record.Unlock()
		// It gives up after its tries, and so asks for the whole to be repeated.
		for lock.Lock() != nil {
		}
		granted := now()
		record.Lock()
		record.waitingSince = nil
		record.Unlock()
		sleep(hold)
		releasing := now()
		if _, err := lock.Unlock(); err != nil {
			log.Fatal(err)
		}
		record.Lock()
		record.turns = append(record.turns, [3]float64{asked, granted, releasing})
		record.Unlock()
		sleep(rand.Float64() * pause)
	}
}

func sleep(seconds float64) {
	time.Sleep(time.Duration(seconds * float64(time.Second)))
}

func number(word string) float64 {
	number, err := strconv.ParseFloat(word, 64)
	if err != nil {
		log.Fatal(err)
	}
	return number
}

func main() {
	if len(os.Args) != 7 {
		log.Fatal("usage: redsync default|10ms URL CLIENTS HOLD PAUSE LENGTH")
	}
	clients := int(number(os.Args[3]))
	hold, pause, length := number(os.Args[4]), number(os.Args[5]), number(os.Args[6])
	var settings []redsync.Option
	if os.Args[1] == "10ms" {
		settings = []redsync.Option{redsync.WithTries(1000), redsync.WithRetryDelay(10 * time.Millisecond)}
	}
	options, err := redis.ParseURL(os.Args[2])
	if err != nil {
		log.Fatal(err)
	}

	locks, records := make([]*redsync.Mutex, clients), make([]*record, clients)
	for i := range locks {
		connection := redis.NewClient(options)
		if err := connection.Ping(context.Background()).Err(); err != nil {
			log.Fatal(err)
		}
		locks[i] = redsync.New(goredis.NewPool(connection)).NewMutex("lock", settings...)
		records[i] = &record{}
	}
	start := time.Now()
	now := func() float64 { return time.Since(start).Seconds() }
	for i := range locks {
		go client(locks[i], records[i], hold, pause, now)
	}
	sleep(length)

	type printed struct {
		Turns        [][3]float64 `json:"turns"`
		WaitingSince *float64     `json:"waiting_since"`
	}
	logs := []printed{}
	for _, record := range records {
		// Kept locked: what a client does from here on is not counted.
		record.Lock()
		turns := [][3]float64{}
		for _, turn := range record.turns {
			if turn[2] < length {
				turns = append(turns, turn)
			}
		}
		logs = append(logs, printed{turns, record.waitingSince})
	}
	if err := json.NewEncoder(os.Stdout).Encode(logs); err != nil {
		log.Fatal(err)
	}
}
