package gocron_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-co-op/gocron/v2"

	lockers "github.com/lockkeeper/lockkeeper/clients/go/adapters/gocron"
	"github.com/lockkeeper/lockkeeper/clients/go/adapters/internal/server"
)

func TestAJobRunsOnOneOfManySchedulers(t *testing.T) {
	rdb, client := server.Start(t)
	var runs atomic.Int32
	var schedulers []gocron.Scheduler
	for range 5 {
		scheduler, err := gocron.NewScheduler(gocron.WithDistributedLocker(lockers.New(client, 30*time.Second)))
		if err != nil {
			t.Fatal(err)
		}
		_, err = scheduler.NewJob(gocron.OneTimeJob(gocron.OneTimeJobStartImmediately()),
			gocron.NewTask(func() { runs.Add(1) }), gocron.WithName("report"))
		if err != nil {
			t.Fatal(err)
		}
		schedulers = append(schedulers, scheduler)
	}
	for _, scheduler := range schedulers {
		scheduler.Start()
	}
	for _, scheduler := range schedulers {
		if err := scheduler.StopJobs(); err != nil {
			t.Error(err)
		}
		if err := scheduler.Shutdown(); err != nil {
			t.Error(err)
		}
	}
	if runs.Load() != 1 {
		t.Fatalf("it ran %d times", runs.Load())
	}
	if left := rdb.PTTL(t.Context(), "report").Val(); left < 20*time.Second {
		t.Fatalf("it is kept for %v", left)
	}
}
