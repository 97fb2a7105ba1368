use super::*;
use crate::time::MAX_INTEGER;
use proptest::prelude::*;

const NOW: UnixUs = UnixUs(1_800_000_000_000_000);

/// A lease that ends so many milliseconds from now.
fn end(ms: i64) -> UnixMs {
    UnixMs(NOW.ms().0 + ms)
}

fn owner(name: &str) -> Owner<'_> {
    Owner::new(name.as_bytes()).unwrap()
}

fn limit(number: u64) -> Limit {
    Limit::new(number).unwrap()
}

fn holder(name: &str, number: u64, allows: u64, ms: i64) -> Holder<'_> {
    Holder {
        owner: owner(name),
        fence: Fence(number),
        limit: limit(allows),
        ends_at: end(ms),
    }
}

fn holders<const N: usize>(all: [Holder; N]) -> Holders {
    let mut holders = Holders::default();
    all.into_iter().for_each(|holder| holders.join(holder));
    holders
}

fn names(holders: &Holders) -> Vec<&[u8]> {
    holders.iter().map(|holder| holder.owner.bytes()).collect()
}

const LIST: &[u8] = b"+1795986866264000:0001795986896264:0005:0001:005:alice\
                       1795986866264001:0001795986899264:0005:0001:003:bob";

#[test]
fn a_list_has_a_record_for_each_holder_in_the_order_of_their_grants() {
    let now = UnixUs(1_795_986_867_000_000);
    let holders = Holders::read(LIST, now).unwrap();
    let ends_at = UnixMs(1_795_986_896_264);
    assert_eq!(
        holders.iter().collect::<Vec<_>>(),
        [
            Holder {
                owner: owner("alice"),
                fence: Fence(1_795_986_866_264_000),
                limit: limit(5),
                ends_at,
            },
            Holder {
                owner: owner("bob"),
                fence: Fence(1_795_986_866_264_001),
                limit: limit(5),
                ends_at: UnixMs(ends_at.0 + 3_000),
            },
        ]
    );
    assert_eq!(holders.next_end(), Some(ends_at));
    let value = holders.value().unwrap();
    assert_eq!(value.bytes, LIST);
    assert_eq!(value.ends_at, UnixMs(ends_at.0 + 3_000));
}

#[test]
fn whatever_is_not_a_list_from_end_to_end_is_none() {
    let one = |record: &str| [b"+", record.as_bytes()].concat();
    let good = "0000000000000001:0001795986896264:0005:0001:005:alice";
    assert!(Holders::read(&one(good), NOW).is_some());
    for bad in [
        "",
        "0000000000000000:0001795986896264:0005:0001:005:alice", // no fence is 0
        "9007199254740992:0001795986896264:0005:0001:005:alice", // nor above 2^53 - 1
        "0000000000000001:0001795986896264:0001:0001:005:alice", // who is alone has no list
        "0000000000000001:0001795986896264:0000:0001:005:alice",
        "0000000000000001:0001795986896264:1001:0001:005:alice",
        "0000000000000001:0001795986896264:0005:0000:005:alice",
        "0000000000000001:0001795986896264:0005:1001:005:alice",
        "0000000000000001:0001795986896264:0005:0001:000:",
        "0000000000000001:0001795986896264:0005:0001:006:alice",
        "0000000000000001:0001795986896264:0005:0001:004:alice",
        "0000000000000001:-001795986896264:0005:0001:005:alice",
        "0000000000000001:00017959868962 4:0005:0001:005:alice",
        "0000000000000001;0001795986896264:0005:0001:005:alice",
        "0000000000000001:0001795986896264:5:0001:005:alice",
    ] {
        assert_eq!(Holders::read(&one(bad), NOW), None, "{bad}");
        let after_a_good_one = [one(good), bad.into()].concat();
        assert_eq!(
            Holders::read(&after_a_good_one, NOW).is_some(),
            bad.is_empty(),
            "{bad}"
        );
    }
    assert_eq!(Holders::read(good.as_bytes(), NOW), None);
    assert_eq!(Holders::read(b"", NOW), None);
    assert_eq!(Holders::read(b"+", NOW), None);
}

#[test]
fn the_smallest_and_the_largest_numbers_are_read() {
    let list = b"+0000000000000001:0000000000000000:0002:0001:001:a\
                 9007199254740991:9999999999999999:1000:1000:001:b";
    let read = Holders::read(list, UnixUs(0)).unwrap();
    let numbers = |of: Holder| (of.fence.0, of.ends_at.0, of.limit.0);
    assert_eq!(
        read.iter().map(numbers).collect::<Vec<_>>(),
        [(1, 0, 2), (MAX_INTEGER, LAST_END, 1_000)]
    );
    assert!(!read.admits(owner("c"), Limit::SHARED));
}

#[test]
fn a_list_has_at_most_a_thousand_holders_with_the_longest_of_names() {
    let list = |number: usize| {
        let record = format!(
            "0000000000000001:0009999999999999:1000:0001:512:{}",
            "o".repeat(MAX_OWNER)
        );
        format!("+{}", record.repeat(number)).into_bytes()
    };
    assert_eq!(list(1_000).len(), LONGEST);
    let thousand = Holders::read(&list(1_000), NOW).unwrap();
    assert_eq!(thousand.iter().count(), 1_000);
    assert_eq!(Holders::read(&list(1_001), NOW), None);
    let longer = format!(
        "+0000000000000001:0009999999999999:1000:0001:513:{}",
        "o".repeat(MAX_OWNER + 1)
    );
    assert_eq!(Holders::read(longer.as_bytes(), NOW), None);
    // Nor more with shorter names.
    let short = "0000000000000001:0009999999999999:1000:0001:001:o".repeat(1_001);
    assert_eq!(Holders::read(format!("+{short}").as_bytes(), NOW), None);
}

#[test]
fn one_holder_that_allows_no_company_has_no_list() {
    let alone = holders([holder("me", 7, 1, 500)]);
    let value = alone.value().unwrap();
    assert_eq!(value.bytes, b"0000000000000007:me");
    assert_eq!(value.ends_at, end(500));
    assert_eq!(Holders::default().value(), None);
}

#[test]
fn the_caller_is_admitted_if_no_holder_has_more_company_than_it_allows() {
    for (held, asked, admitted) in [
        (&[][..], 1, true),
        (&[2], 2, true),
        (&[2], 1, false),
        (&[2], 1_000, true),
        (&[2, 2], 2, false),
        (&[2, 1_000], 1_000, false), // the strictest counts
        (&[3, 1_000], 3, true),
        (&[3, 1_000], 2, false),
        (&[1], 1_000, false),
    ] {
        let mut holders = Holders::default();
        for (number, allows) in held.iter().enumerate() {
            let name = number.to_string();
            holders.join(holder(&name, 1 + number as u64, *allows, 500));
        }
        let admits = holders.admits(owner("me"), limit(asked));
        assert_eq!(admits, admitted, "{asked} beside {held:?}");
    }
}

#[test]
fn what_the_owner_holds_itself_does_not_count() {
    let both = holders([holder("me", 1, 2, 500), holder("you", 2, 2, 500)]);
    assert!(both.admits(owner("me"), limit(2)));
    assert!(both.admits(owner("me"), limit(1_000)));
    assert!(!both.admits(owner("me"), limit(1)));
    assert!(!both.admits(owner("third"), limit(2)));
    let alone = holders([holder("me", 1, 2, 500)]);
    assert!(alone.admits(owner("me"), limit(1)));
}

#[test]
fn a_forged_weight_counts_as_so_many_holders() {
    let heavy = b"+0000000000000001:9999999999999999:0005:0004:005:heavy";
    let holders = Holders::read(heavy, NOW).unwrap();
    assert!(holders.admits(owner("me"), limit(5)));
    assert!(!holders.admits(owner("me"), limit(4)));
}

#[test]
fn whose_lease_has_ended_does_not_count_but_its_fence_does() {
    let all = holders([
        holder("ended", 8, 2, -1),
        holder("living", 5, 2, 10),
        holder("ended too", 7, 2, -1),
        holder("lasts to this millisecond", 6, 2, 0),
    ]);
    let value = all.value().unwrap().bytes;
    let read = Holders::read(&value, NOW).unwrap();
    assert_eq!(names(&read), [&b"living"[..], b"lasts to this millisecond"]);
    assert_eq!(read.highest(), Some(Fence(8)));
    let later = UnixUs(NOW.0 + 11_000);
    let nobody = Holders::read(&value, later).unwrap();
    assert!(nobody.is_empty());
    assert_eq!(nobody.highest(), Some(Fence(8)));
    assert_eq!(nobody.value(), None);
}

#[test]
fn a_fence_more_than_a_day_ahead_does_not_hide_the_highest_of_the_others() {
    let day_us = 86_400_000_000;
    let forged = holders([
        holder("real", NOW.0 + day_us, 3, 10),
        holder("forged", NOW.0 + day_us + 1, 3, 10),
        holder("earlier", 8, 3, 10),
    ]);
    let read = Holders::read(&forged.value().unwrap().bytes, NOW).unwrap();
    assert_eq!(read.highest(), Some(Fence(NOW.0 + day_us)));
    let only_forged = holders([holder("forged", NOW.0 + day_us + 1, 3, 10)]);
    let read = Holders::read(&only_forged.value().unwrap().bytes, NOW).unwrap();
    assert_eq!(read.highest(), None);
}

#[test]
fn joining_again_and_leaving_drop_all_that_the_owner_held() {
    let twice = b"+0000000000000001:9999999999999999:0005:0001:002:me\
                  0000000000000002:9999999999999999:0005:0001:003:you\
                  0000000000000003:9999999999999999:0005:0001:002:me";
    let read = Holders::read(twice, NOW).unwrap();
    assert_eq!(names(&read), [&b"me"[..], b"you", b"me"]);

    let mut again = read.clone();
    again.join(holder("me", 4, 9, 10));
    assert_eq!(names(&again), [&b"you"[..], b"me"]);

    let mut left = read.clone();
    assert!(left.leave(owner("me")));
    assert_eq!(names(&left), [b"you"]);
    assert!(!left.leave(owner("me")));

    let mut renewed = read;
    assert!(renewed.renew(owner("me"), end(1)));
    let not_yours = renewed.iter().filter(|of| of.owner != owner("you"));
    assert!(not_yours.map(|of| of.ends_at).eq([end(1), end(1)]));
    assert_eq!(renewed.next_end(), Some(end(1)));
    assert!(!renewed.renew(owner("third"), end(1)));
}

#[test]
fn one_grant_is_taken_out_and_no_other() {
    let both = holders([holder("me", 1, 2, 500), holder("you", 2, 2, 500)]);
    for (name, number, left) in [
        ("me", 1, &[&b"you"[..]][..]),
        ("you", 2, &[&b"me"[..]]),
        ("me", 2, &[&b"me"[..], b"you"]),
        ("third", 1, &[&b"me"[..], b"you"]),
    ] {
        let mut rest = both.clone();
        let removed = rest.leave_grant(owner(name), Fence(number));
        assert_eq!(names(&rest), left);
        assert_eq!(removed, left.len() == 1);
    }
}

#[test]
fn a_renewal_leaves_the_others_and_the_order_as_they_are() {
    let mut both = holders([holder("me", 1, 2, 500), holder("you", 2, 2, 700)]);
    assert!(both.renew(owner("me"), end(900)));
    assert_eq!(
        both.iter().collect::<Vec<_>>(),
        [holder("me", 1, 2, 900), holder("you", 2, 2, 700)]
    );
    assert_eq!(both.next_end(), Some(end(700)));
    assert_eq!(both.last_end(), Some(end(900)));
}

#[test]
fn an_end_that_there_is_no_room_for_is_the_last_there_is() {
    for (ends_at, written) in [(i64::MAX, LAST_END), (LAST_END + 1, LAST_END), (-1, 0)] {
        let ends_at = UnixMs(ends_at);
        let mut holders = holders([Holder {
            ends_at,
            ..holder("me", 1, 2, 0)
        }]);
        assert_eq!(holders.last_end(), Some(UnixMs(written)));
        assert!(holders.renew(owner("me"), ends_at));
        assert_eq!(holders.last_end(), Some(UnixMs(written)));
    }
}

#[test]
fn the_smallest_limit_is_that_of_the_list() {
    let both = holders([holder("me", 1, 9, 500), holder("you", 2, 4, 500)]);
    assert_eq!(both.limit(), Some(limit(4)));
    assert_eq!(Holders::default().limit(), None);
}

fn any_record() -> impl Strategy<Value = String> {
    let name = "[ab:0+]{1,3}";
    let number = prop_oneof![Just(1), Just(2), Just(5), Just(1_000)];
    (1..1_000u64, -2..5i64, number, 0..2u16, name).prop_map(|(fence, ms, limit, weight, name)| {
        let (end, length) = (end(ms).0, name.len());
        format!("{fence:016}:{end:016}:{limit:04}:{weight:04}:{length:03}:{name}")
    })
}

proptest! {
    #[test]
    fn any_bytes_are_no_list_or_one_that_is_written_as_it_was(
        records in prop::collection::vec(any_record(), 1..5),
        cut in prop::option::of((0..300usize, any::<u8>())),
    ) {
        let mut value = format!("+{}", records.concat()).into_bytes();
        if let Some((at, byte)) = cut {
            let at = at % value.len();
            value[at] = byte;
        }
        if let Some(holders) = Holders::read(&value, UnixUs(0)) {
            prop_assert_eq!(holders.value().unwrap().bytes, value);
        }
    }

    #[test]
    fn what_is_written_is_read_back(
        all in prop::collection::vec(
            (1..=LAST_END, 2..=1_000u64, prop::collection::vec(any::<u8>(), 1..=MAX_OWNER)),
            1..20,
        ),
    ) {
        let mut holders = Holders::default();
        for (number, (end, allows, name)) in all.iter().enumerate() {
            holders.join(Holder {
                owner: Owner::new(name).unwrap(),
                fence: Fence(1 + number as u64),
                limit: limit(*allows),
                ends_at: UnixMs(*end),
            });
        }
        let value = holders.clone().value().unwrap();
        let read = Holders::read(&value.bytes, UnixUs(0)).unwrap();
        prop_assert!(read.iter().eq(holders.iter()));
        prop_assert_eq!(read.highest(), holders.highest());
        prop_assert_eq!(holders.last_end(), Some(value.ends_at));
        prop_assert!(may_be_list(value.bytes.len()));
    }

    /// Who is admitted, joins; others leave and end. Each holder's limit is at least the number of holders.
    #[test]
    fn no_holder_ever_has_more_company_than_it_allows(
        steps in prop::collection::vec((0..6usize, 0..4usize, any::<bool>(), 0..8i64), 1..60),
    ) {
        let (mut holders, mut now) = (Holders::default(), NOW);
        for (number, (who, allows, leaves, ms)) in steps.into_iter().enumerate() {
            now.0 += 1_000;
            if let Some(value) = holders.clone().value().filter(|value| value.bytes[0] == MARK) {
                holders = Holders::read(&value.bytes, now).unwrap();
            }
            let name = ["a", "b", "c", "d", "e", "f"][who];
            let limit = limit([1, 2, 3, 1_000][allows]);
            if leaves {
                holders.leave(owner(name));
            } else if holders.admits(owner(name), limit) {
                let ends_at = UnixMs(now.ms().0 + ms);
                holders.join(Holder { owner: owner(name), fence: Fence(1 + number as u64), limit, ends_at });
            }
            let living = holders.iter().count();
            prop_assert!(holders.iter().all(|holder| usize::from(holder.limit.number()) >= living));
        }
    }
}
