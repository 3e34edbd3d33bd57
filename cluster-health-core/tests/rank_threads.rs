//! Ranks that are threads of this process.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::AsFd;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use cluster_health_core::{Error, RankGroup};

/// What a busy machine may add to what takes no time; less than the usual timeout of a group.
const SLACK: Duration = Duration::from_secs(5);

/// Runs `body` on one thread per rank and returns what the ranks returned, in order.
fn on_threads<T: Send>(size: u32, body: impl Fn(&mut RankGroup) -> T + Sync) -> Vec<T> {
    let groups = RankGroup::threads(size).expect("enough descriptors");
    thread::scope(|scope| {
        let body = &body;
        let running: Vec<_> =
            groups.into_iter().map(|mut group| scope.spawn(move || body(&mut group))).collect();
        running.into_iter().map(|one| one.join().expect("no rank panics")).collect()
    })
}

#[test]
fn every_rank_talks_to_every_other() {
    let heard = on_threads(4, |group| {
        let me = group.rank();
        let others = || (0..group.size()).filter(move |&peer| peer != me);
        for peer in others() {
            group.send(peer, format!("{me} to {peer}").as_bytes()).unwrap();
            group.send(peer, &[]).unwrap();
        }
        // In reverse, so that messages have to wait for their turn.
        let mut heard = Vec::new();
        for peer in others().collect::<Vec<_>>().into_iter().rev() {
            heard.push(String::from_utf8(group.receive(peer).unwrap()).unwrap());
            assert_eq!(group.receive(peer).unwrap(), [0_u8; 0]);
            assert!(group.same_host(peer));
        }
        assert!(group.same_host(me));
        assert!(!group.same_host(4));
        heard
    });
    assert_eq!(heard[1], ["3 to 1", "2 to 1", "0 to 1"]);
    assert_eq!(heard[3], ["2 to 3", "1 to 3", "0 to 3"]);
}

#[test]
fn a_group_of_one_needs_nobody() {
    let groups = RankGroup::threads(1).unwrap();
    groups[0].all_equal("plan", "anything").unwrap();
    groups[0].check_alive(0).unwrap();
    assert!(matches!(groups[0].send(0, b"x"), Err(Error::Invalid { .. })));
    assert!(matches!(groups[0].receive(1), Err(Error::Invalid { .. })));
    assert!(matches!(RankGroup::threads(0), Err(Error::Invalid { .. })));
}

/// More than any socket holds, in both directions at once, around a ring as well.
#[test]
fn the_longest_messages_cross_without_deadlock() {
    const LENGTH: usize = 16 << 20;
    on_threads(3, |group| {
        let (me, size) = (group.rank(), group.size());
        let (next, previous) = ((me + 1) % size, (me + size - 1) % size);
        // No period of a power of two, and another one for each rank.
        let byte = |rank: u32, at: usize| (at % 251 + rank as usize).to_le_bytes()[0];
        let message: Vec<u8> = (0..LENGTH).map(|at| byte(me, at)).collect();
        group.send(next, &message).unwrap();
        group.send(previous, &message[..LENGTH / 2]).unwrap();
        let from_previous = group.receive(previous).unwrap();
        assert_eq!(from_previous.len(), LENGTH);
        let first_wrong = (0..LENGTH).find(|&at| from_previous[at] != byte(previous, at));
        assert_eq!(first_wrong, None);
        assert_eq!(group.receive(next).unwrap().len(), LENGTH / 2);
        let too_long = vec![0; LENGTH + 1];
        assert!(matches!(group.send(next, &too_long), Err(Error::Invalid { .. })));
    });
}

#[test]
fn descriptors_arrive_by_tag_between_messages() {
    let texts = on_threads(2, |group| {
        if group.rank() == 0 {
            for (tag, text) in [(7, "seven"), (8, "eight"), (7, "seven again")] {
                let mut file = tempfile::tempfile().unwrap();
                file.write_all(text.as_bytes()).unwrap();
                group.send(1, text.as_bytes()).unwrap();
                group.send_fd(1, tag, file.as_fd()).unwrap();
            }
            group.send(1, b"end").unwrap();
            return Vec::new();
        }
        let read = |tag| {
            let mut file = File::from(group.receive_fd(0, tag).unwrap());
            file.rewind().unwrap();
            let mut text = String::new();
            file.read_to_string(&mut text).unwrap();
            text
        };
        let texts = vec![read(8), read(7), read(7)];
        for expected in ["seven", "eight", "seven again", "end"] {
            assert_eq!(group.receive(0).unwrap(), expected.as_bytes());
        }
        texts
    });
    assert_eq!(texts[1], ["eight", "seven", "seven again"]);
}

#[test]
fn silence_is_a_timeout_that_names_the_rank() {
    let over = Barrier::new(3);
    on_threads(3, |group| {
        group.set_timeout(Duration::from_millis(200));
        if group.rank() == 0 {
            let start = Instant::now();
            let error = group.receive(2).unwrap_err();
            let waited = start.elapsed();
            assert_eq!((error.kind(), error.rank()), ("timeout", Some(2)), "{error}");
            assert!(error.to_string().contains("rank 2"), "{error}");
            assert!(waited >= group.timeout() && waited < SLACK, "{waited:?}");
            group.check_alive(2).unwrap();
            // A message nobody takes: the bound holds for sending, too.
            let start = Instant::now();
            let error = group.send(2, &vec![0; 16 << 20]).unwrap_err();
            assert_eq!((error.kind(), error.rank()), ("timeout", Some(2)), "{error}");
            assert!(start.elapsed() < SLACK);
            // What was left half sent must not be continued by another message.
            assert_eq!(group.send(2, b"x").unwrap_err().kind(), "rank");
            group.send(1, b"fine").unwrap();
        }
        over.wait();
    });
}

#[test]
fn a_rank_that_left_is_seen_at_once_and_its_last_words_are_kept() {
    let left = Barrier::new(2);
    let groups = RankGroup::threads(2).unwrap();
    thread::scope(|scope| {
        let mut groups = groups.into_iter();
        let (zero, one) = (groups.next().unwrap(), groups.next().unwrap());
        let left = &left;
        scope.spawn(move || {
            one.send(0, b"last words").unwrap();
            drop(one);
            left.wait();
        });
        left.wait();
        let error = zero.check_alive(1).unwrap_err();
        assert_eq!((error.kind(), error.rank()), ("rank", Some(1)));
        assert_eq!(zero.receive(1).unwrap(), b"last words");
        let start = Instant::now();
        let error = zero.receive(1).unwrap_err();
        assert!(error.to_string().contains("rank 1 closed its connection"), "{error}");
        assert_eq!(zero.send(1, b"x").unwrap_err().rank(), Some(1));
        assert!(start.elapsed() < SLACK);
    });
}

#[test]
fn equal_texts_pass_and_the_first_difference_is_named_everywhere() {
    let plan = |seed: u32| format!("{{\n  \"sizes\": [8],\n  \"seed\": {seed},\n  \"n\": 3\n}}");
    let results = on_threads(3, |group| {
        group.all_equal("plan", &plan(7)).unwrap();
        let seed = if group.rank() == 2 { 8 } else { 7 };
        let first = group.all_equal("plan", &plan(seed)).unwrap_err();
        // The group stays usable.
        let shorter = if group.rank() == 1 { "a\nb" } else { "a\nb\nc" };
        let second = group.all_equal("host list", shorter).unwrap_err();
        group.all_equal("plan", "same").unwrap();
        (first, second)
    });
    for (first, second) in &results {
        assert_eq!(first.kind(), "invalid");
        let text = first.to_string();
        for part in ["plan: rank 2 ", "line 3", "`\"seed\": 7,`", "`\"seed\": 8,`"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        let text = second.to_string();
        for part in ["host list: rank 1 ", "line 3", "`c` on rank 0", "missing on rank 1"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }
    assert_eq!(results[0].0.to_string(), results[1].0.to_string());
}

#[test]
fn all_ranks_learn_which_one_did_not_compare() {
    let over = Barrier::new(3);
    let results = on_threads(3, |group| {
        group.set_timeout(Duration::from_millis(300));
        let start = Instant::now();
        let result = if group.rank() == 2 { Ok(()) } else { group.all_equal("plan", "same") };
        let waited = start.elapsed();
        over.wait();
        (result, waited)
    });
    for (result, waited) in &results[..2] {
        let error = result.as_ref().unwrap_err();
        assert_eq!((error.kind(), error.rank()), ("timeout", Some(2)), "{error}");
        assert!(*waited < SLACK, "{waited:?}");
    }
}
