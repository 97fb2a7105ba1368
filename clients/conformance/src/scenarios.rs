//! The scenarios, by subject. Their names say what is promised.

use std::time::Duration;

use testkit::cluster::Cluster;
use testkit::waiting::waiters;
use testkit::{NO, Server, ask, eventually};

use crate::agent::Kind;

mod acquiring;
mod cancelling;
mod faults;
mod leases;
mod processes;
mod refusals;
mod releasing;
mod servers;
mod several;
mod waiting;

/// One promise, shown on one kind of agent.
pub struct Scenario {
    /// `subject::promise`.
    pub name: &'static str,
    /// What an agent must be able to do, or the scenario is left out.
    pub needs: &'static [&'static str],
    pub run: fn(&Kind) -> Outcome,
}

/// Why a scenario was left out, if it was: the server cannot do what it needs.
pub type Outcome = Result<(), &'static str>;

macro_rules! scenarios {
    ($($subject:ident { $($name:ident $([$($need:literal),+])?,)+ })+) => {
        /// All of them.
        pub const ALL: &[Scenario] = &[$($(Scenario {
            name: concat!(stringify!($subject), "::", stringify!($name)),
            needs: &[$($($need),+)?],
            run: |kind| $subject::$name(kind).outcome(),
        },)+)+];
    };
}

scenarios! {
    acquiring {
        a_lock_has_a_fence_that_grows_and_an_owner_of_its_own,
        the_ttl_is_30_s_unless_said_otherwise,
        busy_is_an_answer_and_no_error,
        what_makes_no_sense_is_refused_before_anything_is_sent,
        a_key_is_any_bytes,
        info_tells_who_holds_and_how_many_wait,
        a_section_costs_two_commands,
        a_contended_section_costs_three_commands,
        no_connection_is_open_before_the_first_lock_nor_long_after_the_last ["hang_up"],
        a_server_without_the_module_refuses_at_once_and_says_so,
        a_refusal_keeps_the_words_of_the_server,
        a_server_that_was_never_there_is_told_at_once_to_who_does_not_wait,
        a_try_at_a_silent_server_takes_5_s_whatever_the_ttl,
        a_slow_reply_is_counted_from_the_send,
        a_grant_of_which_a_third_has_passed_is_renewed_first,
        a_lost_reply_is_asked_for_again_under_another_owner,
        a_connection_that_breaks_before_the_reply_is_replaced,
        a_request_that_arrives_after_we_hung_up_brings_no_lock,
        idle_connections_that_died_cost_nothing,
    }
    leases {
        a_lock_is_renewed_every_third_of_its_ttl,
        a_deleted_lock_is_lost_at_the_next_renewal,
        a_lock_that_was_taken_is_lost_and_the_new_holder_is_safe,
        a_loss_is_told_once,
        renew_asks_the_server_now,
        an_extended_lease_is_not_cut_to_the_ttl_again,
        an_extension_is_renewed_before_it_ends,
        max_hold_ends_renewal_and_is_told,
        what_is_released_or_left_is_not_lost,
        what_happens_is_logged,
        many_locks_are_renewed_in_time_over_one_connection,
    }
    releasing {
        nothing_is_renewed_after_the_release,
        a_lock_that_is_left_lapses_by_itself,
        release_after_keeps_the_lock_until_so_long_after_the_grant,
        a_dropped_handle_is_released ["drop"],
        a_release_is_tried_on_until_it_arrives,
        a_release_whose_reply_is_lost_is_a_release,
        a_release_that_nobody_answers_is_told_within_5_s,
        a_release_of_a_lost_lock_says_so_and_harms_nobody,
        settled_waits_for_what_was_given_up_before ["drop"],
        settled_does_not_wait_for_what_others_wait_for ["drop"],
        settled_is_bounded ["drop"],
        run_holds_the_lock_while_the_body_runs,
        the_error_of_the_body_wins_over_that_of_the_release,
        a_body_that_panics_releases ["panic"],
        a_body_is_told_that_the_lock_was_lost,
        a_body_is_ended_when_the_lock_is_lost ["cancel_body"],
    }
    waiting {
        who_waits_is_granted_when_the_holder_releases,
        who_waits_outlives_the_death_of_the_holder,
        who_waits_is_served_first_come_first_served,
        a_wait_of_nothing_is_one_try,
        a_wait_returns_in_time_whatever_the_server_does,
        a_server_that_falls_silent_before_a_wait_is_unreachable_not_busy,
        a_server_that_hangs_during_a_wait_is_unreachable_not_busy,
        who_waits_goes_where_the_master_is,
        a_grant_after_a_long_wait_is_renewed_before_it_is_handed_out,
        a_grant_that_lapsed_unheard_is_not_handed_out,
        a_connection_that_the_server_ended_keeps_its_place,
        waiting_for_one_key_never_delays_the_renewal_of_another,
        who_is_unblocked_by_an_administrator_waits_on,
        a_full_queue_is_waited_out,
        a_server_that_was_not_there_yet_is_waited_for,
        a_server_that_restarts_is_waited_for,
        who_may_only_acquire_renew_and_release_waits_all_the_same,
    }
    cancelling {
        what_was_granted_to_nobody_is_released ["cancel"],
        a_cancelled_request_that_arrives_late_leaves_no_lock ["cancel"],
        a_try_that_is_cancelled_at_any_moment_leaves_nothing ["cancel_at_any_moment"],
        a_wait_that_is_cancelled_leaves_no_place_in_the_queue ["cancel"],
        a_wait_that_is_cancelled_at_any_moment_leaves_nothing ["cancel_at_any_moment"],
        a_cancelled_wait_is_released_however_late_its_request_arrives ["cancel"],
        a_release_that_is_cancelled_at_any_moment_is_carried_out ["cancel_at_any_moment"],
    }
    faults {
        a_killed_connection_loses_nothing,
        a_paused_server_loses_nothing,
        a_cut_shorter_than_the_lease_loses_nothing,
        a_cut_longer_than_the_lease_is_told_before_the_server_lets_go,
        silence_is_as_good_as_a_cut,
        a_dial_that_hangs_costs_no_lock,
        a_server_clock_that_steps_an_hour_does_not_fool_the_lease,
        a_module_that_is_replaced_costs_no_lock,
        behind_one_address_a_new_master_is_found_after_readonly,
        behind_one_address_a_new_master_is_found_after_the_old_one_froze,
    }
    processes {
        code_that_blocks_loses_nothing ["block"],
        a_forked_child_holds_nothing_and_leaves_its_parent_alone ["fork"],
        a_process_that_was_stopped_past_its_ttl_knows_at_once,
        a_program_that_ends_releases_what_it_holds,
        a_killed_holder_blocks_others_for_one_ttl_and_no_longer,
    }
    refusals {
        a_server_that_loads_its_data_is_waited_for,
        a_server_busy_with_a_script_is_waited_for,
        a_master_that_lacks_replicas_is_waited_for,
        a_replica_that_has_lost_its_master_is_waited_for,
        a_cluster_that_is_down_is_waited_for,
    }
    several {
        as_many_hold_a_lock_as_its_limit_says,
        a_limit_that_makes_no_sense_is_refused_before_anything_is_sent,
        readers_share_and_a_writer_is_alone,
        a_reader_does_not_pass_a_waiting_writer,
        a_killed_holder_frees_its_place_and_no_other,
        a_grant_of_a_place_that_was_not_heard_is_found_among_the_holders,
        a_cancelled_wait_for_a_place_leaves_nothing ["cancel_at_any_moment"],
        info_tells_every_holder,
        an_upgrade_is_one_try,
        a_downgrade_lets_readers_in,
        a_change_leaves_an_extended_lease_as_long_as_it_is,
        an_upgrade_of_a_lost_lock_takes_nothing,
        an_upgrade_whose_reply_is_lost_is_an_upgrade,
        an_upgrade_that_nobody_answers_costs_no_lock,
        a_downgrade_that_arrives_late_makes_no_writer_share,
    }
    servers {
        a_unix_socket_is_reached,
        a_user_a_database_and_either_protocol_are_used,
        tls_with_an_authority_of_our_own,
        a_lock_of_a_cluster_moves_with_its_slot,
        a_lock_outlives_a_failover_by_sentinels,
        only_what_enough_replicas_acknowledged_counts,
    }
}

trait IntoOutcome {
    fn outcome(self) -> Outcome;
}

impl IntoOutcome for () {
    fn outcome(self) -> Outcome {
        Ok(())
    }
}

impl IntoOutcome for Outcome {
    fn outcome(self) -> Outcome {
        self
    }
}

// What scenarios of several subjects look at.

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn sleep(millis: u64) {
    std::thread::sleep(ms(millis));
}

fn exists(server: &Server, key: &str) -> bool {
    ask!(server.connect(), "EXISTS", key) != NO
}

#[track_caller]
fn eventually_free(server: &Server, key: &str) {
    eventually(format!("{key} is free"), || !exists(server, key));
}

#[track_caller]
fn eventually_waiting(server: &Server, key: &str, count: i64) {
    let mut redis = server.connect();
    eventually(format!("{count} wait for {key}"), || {
        waiters(&mut redis, key) == count
    });
}

/// How often the server has carried out a command, by its lower-case name.
fn calls(server: &Server, command: &str) -> u64 {
    testkit::client::calls(server, command)
}

/// How often the server has refused a command before it was carried out.
fn rejected(server: &Server, command: &str) -> u64 {
    let mut redis = server.connect();
    let stats: String = redis::cmd("INFO")
        .arg("commandstats")
        .query(&mut redis)
        .unwrap();
    let line = stats
        .lines()
        .find(|line| line.starts_with(&format!("cmdstat_{command}:")));
    let number = line.and_then(|line| {
        line.split(',')
            .find_map(|field| field.strip_prefix("rejected_calls="))
    });
    number.map_or(0, |number| number.parse().unwrap())
}

fn renewals(server: &Server) -> u64 {
    calls(server, "lock.renew")
}

#[track_caller]
fn eventually_renewed(server: &Server, times: u64) {
    let enough = renewals(server) + times;
    eventually("it is renewed", || renewals(server) >= enough);
}

/// Owner and fence, as the value of the key tells them.
#[track_caller]
fn lock_of(server: &Server, key: &str) -> (String, u64) {
    let mut redis = server.connect();
    let value: String = redis::cmd("GET").arg(key).query(&mut redis).unwrap();
    let (fence, owner) = value.split_once(':').unwrap();
    (owner.to_owned(), fence.parse().unwrap())
}

/// The end that the server keeps for a lock, by the clock of the agents, in microseconds: not later than
/// the true one.
#[track_caller]
fn ends_at(server: &Server, key: &str) -> u64 {
    let asked = crate::agent::now_us();
    let ttl = testkit::number(ask!(server.connect(), "PTTL", key));
    // PTTL rounds up.
    asked + (ttl as u64).saturating_sub(1) * 1000
}

/// How agents are told of a cluster.
fn url_of(cluster: &Cluster) -> String {
    let nodes = cluster.nodes.each_ref();
    let nodes = nodes.map(|node| format!("127.0.0.1:{}", node.port()));
    format!("redis+cluster://{}", nodes.join(","))
}

fn client_list(server: &Server) -> String {
    let mut redis = server.connect();
    redis::cmd("CLIENT").arg("LIST").query(&mut redis).unwrap()
}

/// How many clients are connected, but for those who ask this.
fn connections(server: &Server) -> usize {
    client_list(server).lines().count() - 1
}
