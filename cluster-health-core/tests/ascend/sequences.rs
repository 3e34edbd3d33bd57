//! Random sequences of operations have the same results on the host backend, whose memory is plain,
//! and on the simulator, and leave nothing behind there.

use std::ffi::{CString, c_char};
use std::mem::ManuallyDrop;

use cluster_health_core::Result;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::*;

/// Which operation, and numbers that it takes modulo whatever it needs.
type Step = (u8, u16, u16, u16);

/// Lengths around the edges that copies and tags have: words, pages, odd ends.
const LENGTHS: [usize; 8] = [1, 7, 8, 9, 129, 4095, 4097, 70_001];

/// What one operation was seen to do.
#[derive(Debug, PartialEq)]
enum Seen {
    Bytes(Vec<u8>),
    Same(bool),
    Done(std::result::Result<(), &'static str>),
    NothingThere,
}

/// Everything alive on one machine.
struct World {
    machine: Machine,
    hosts: Vec<HostBuffer>,
    targets: Vec<DeviceBuffer>,
    streams: Vec<Stream>,
    events: Vec<Event>,
}

/// The element that a number stands for.
fn pick(number: u16, len: usize) -> Option<usize> {
    usize::from(number).checked_rem(len)
}

fn length(number: u16) -> usize {
    LENGTHS[usize::from(number) % LENGTHS.len()]
}

/// Bytes that depend on their place.
fn content(seed: u16, len: usize) -> Vec<u8> {
    (0..len).map(|index| u8::try_from((index * 31 + usize::from(seed)) % 251).unwrap()).collect()
}

fn done(result: Result<()>) -> Seen {
    Seen::Done(result.map_err(|error| error.kind()))
}

fn tags(number: u16, size: usize) -> TagPattern {
    let make = if number.is_multiple_of(2) { TagPattern::sparse } else { TagPattern::full };
    make(u64::from(number), ByteSize(size as u64))
}

impl World {
    fn new(machine: Machine) -> Self {
        let device = machine.devices().remove(0);
        let streams = (0..2).map(|_| Stream::new(&device).unwrap()).collect();
        Self { machine, hosts: Vec::new(), targets: Vec::new(), streams, events: Vec::new() }
    }

    /// The buffers and the stream of a copy, and its length, which now and then is too long.
    fn copy(&mut self, to_device: bool, end: u8, (a, b, c): (u16, u16, u16)) -> Seen {
        let (Some(host), Some(target), Some(stream)) = (
            pick(a, self.hosts.len()),
            pick(b, self.targets.len()),
            pick(a ^ b, self.streams.len()),
        ) else {
            return Seen::NothingThere;
        };
        let Self { hosts, targets, streams, .. } = self;
        let (host, target) = (&mut hosts[host], &mut targets[target]);
        let shorter = host.len().min(target.len());
        let size = ByteSize((usize::from(c) % (shorter + shorter / 8 + 1)) as u64);
        let copy = if to_device {
            Transfer::to_device(&streams[stream], host, target, size, BOUND)
        } else {
            Transfer::to_host(&streams[stream], target, host, size, BOUND)
        };
        done(copy.and_then(|copy| {
            let mut copy = ManuallyDrop::new(copy);
            copy.issue()?;
            // Issued twice is an error, and the first one goes on.
            if c.is_multiple_of(5) {
                copy.issue().unwrap_err();
            }
            match end {
                0 => copy.wait()?,
                1 => {}
                // Leaked: the next use of the buffers has to wait for it.
                _ => return Ok(()),
            }
            drop(ManuallyDrop::into_inner(copy));
            Ok(())
        }))
    }

    /// One source to two buffers, on two streams at once.
    fn copy_twice(&mut self, (a, b, c): (u16, u16, u16)) -> Seen {
        let places = (pick(a, self.hosts.len()), pick(b, self.targets.len()));
        let (Some(host), Some(first)) = places else { return Seen::NothingThere };
        let second = (first + 1) % self.targets.len();
        let Ok([first, second]) = self.targets.get_disjoint_mut([first, second]) else {
            return Seen::NothingThere;
        };
        if self.streams.len() < 2 {
            return Seen::NothingThere;
        }
        let source = &self.hosts[host];
        let shorter = source.len().min(first.len()).min(second.len());
        let size = ByteSize((usize::from(c) % shorter + 1) as u64);
        let mut one = Transfer::to_device(&self.streams[0], source, first, size, BOUND).unwrap();
        let mut two = Transfer::to_device(&self.streams[1], source, second, size, BOUND).unwrap();
        one.issue().unwrap();
        two.issue().unwrap();
        if c.is_multiple_of(2) {
            drop((two, one));
        } else {
            drop((one, two));
        }
        Seen::Done(Ok(()))
    }

    fn step(&mut self, (kind, a, b, c): Step) -> Seen {
        let device = self.machine.devices().remove(0);
        let host = pick(a, self.hosts.len());
        let target = pick(a, self.targets.len());
        match kind {
            0 | 1 => {
                let kind = [HostMemory::PageLocked, HostMemory::Pageable][usize::from(b % 2)];
                let size = ByteSize(length(a) as u64);
                let mut buffer = HostBuffer::new(&self.machine, size, kind).unwrap();
                let bytes = buffer.bytes_mut().unwrap();
                bytes.copy_from_slice(&content(c, length(a)));
                self.hosts.push(buffer);
                Seen::Done(Ok(()))
            }
            2 | 3 => {
                let mut buffer = DeviceBuffer::new(&device, ByteSize(length(a) as u64)).unwrap();
                // Fresh device memory holds anything.
                buffer.write(0, &content(c, length(a))).unwrap();
                self.targets.push(buffer);
                Seen::Done(Ok(()))
            }
            4 => host.map_or(Seen::NothingThere, |place| {
                let bytes = self.hosts[place].bytes_mut().unwrap();
                let start = usize::from(b) % bytes.len();
                let data = content(c, bytes.len() - start);
                bytes[start..].copy_from_slice(&data);
                Seen::Done(Ok(()))
            }),
            5 => host.map_or(Seen::NothingThere, |place| {
                Seen::Bytes(self.hosts[place].bytes().unwrap().to_vec())
            }),
            6 => target.map_or(Seen::NothingThere, |place| {
                // Now and then past the end.
                let data = content(b, length(b));
                done(self.targets[place].write(usize::from(c) % 4096, &data))
            }),
            7 => target.map_or(Seen::NothingThere, |place| {
                let mut data = vec![0; length(b)];
                match self.targets[place].read(usize::from(c) % 4096, &mut data) {
                    Ok(()) => Seen::Bytes(data),
                    Err(error) => Seen::Done(Err(error.kind())),
                }
            }),
            8 => host.map_or(Seen::NothingThere, |place| {
                done(self.hosts[place].write_tags(&tags(b % 4, length(c))))
            }),
            9 => target.map_or(Seen::NothingThere, |place| {
                done(self.targets[place].write_tags(&tags(b % 4, length(c))))
            }),
            10 => host.map_or(Seen::NothingThere, |place| {
                match self.hosts[place].check_tags(&tags(b % 4, length(c))) {
                    Ok(same) => Seen::Same(same),
                    Err(error) => Seen::Done(Err(error.kind())),
                }
            }),
            11 => target.map_or(Seen::NothingThere, |place| {
                match self.targets[place]
                    .check_tags_at(usize::from(a) % 64, &tags(b % 4, length(c)))
                {
                    Ok(same) => Seen::Same(same),
                    Err(error) => Seen::Done(Err(error.kind())),
                }
            }),
            12..=14 => self.copy(true, kind - 12, (a, b, c)),
            15..=17 => self.copy(false, kind - 15, (a, b, c)),
            18 => self.copy_twice((a, b, c)),
            19 => {
                self.events.push(Event::new(&device).unwrap());
                Seen::Done(Ok(()))
            }
            20 => {
                let places = (pick(a, self.events.len()), pick(b, self.streams.len()));
                let (Some(event), Some(stream)) = places else { return Seen::NothingThere };
                done(self.events[event].record(&self.streams[stream]))
            }
            21 => {
                // Only ever from an event to itself: the order of two of different streams is open.
                let Some(event) = pick(a, self.events.len()) else { return Seen::NothingThere };
                for stream in &self.streams {
                    stream.synchronize(BOUND).unwrap();
                }
                // Its stream may have been dropped, and is then waited for by nobody: the device
                // reaches the event a little later.
                let began = Instant::now();
                loop {
                    match self.events[event].nanoseconds_since(&self.events[event]) {
                        Ok(time) => return Seen::Same(time == 0.0),
                        Err(error) if error.kind() != "backend" || began.elapsed() > BOUND / 10 => {
                            return Seen::Done(Err(error.kind()));
                        }
                        Err(_) => std::thread::sleep(Duration::from_micros(100)),
                    }
                }
            }
            22 => {
                if let Some(place) = host {
                    drop(self.hosts.swap_remove(place));
                }
                Seen::Done(Ok(()))
            }
            23 => {
                if let Some(place) = target {
                    drop(self.targets.swap_remove(place));
                }
                Seen::Done(Ok(()))
            }
            24 => {
                // Whatever is in flight on it goes on.
                if let Some(place) = pick(a, self.streams.len()) {
                    drop(self.streams.swap_remove(place));
                }
                self.streams.push(Stream::new(&device).unwrap());
                Seen::Done(Ok(()))
            }
            _ => {
                if let Some(place) = pick(a, self.events.len()) {
                    drop(self.events.swap_remove(place));
                }
                Seen::Done(Ok(()))
            }
        }
    }

    /// Everything that all buffers hold, then drops all in one of several orders.
    fn end(self, order: u8) -> Vec<Vec<u8>> {
        let mut contents: Vec<Vec<u8>> =
            self.hosts.iter().map(|host| host.bytes().unwrap().to_vec()).collect();
        for target in &self.targets {
            let mut data = vec![0; target.len()];
            target.read(0, &mut data).unwrap();
            contents.push(data);
        }
        let Self { machine, hosts, targets, streams, events } = self;
        match order % 4 {
            0 => drop((streams, events, hosts, targets, machine)),
            1 => drop((machine, targets, hosts, events, streams)),
            2 => drop((hosts, streams, targets, machine, events)),
            _ => drop((events, machine, streams, targets, hosts)),
        }
        contents
    }
}

/// What of the simulator is alive that our drops should have given back.
fn leftovers() -> Vec<(&'static str, u64)> {
    // SAFETY:
    // * The simulator is loaded already, and its initialisers have run.
    let library = unsafe { libloading::Library::new(folder().join("libascendcl.so")) }.unwrap();
    // SAFETY:
    // * That is the signature that the simulator's documentation gives.
    let counter = unsafe {
        library.get::<unsafe extern "C" fn(*const c_char) -> u64>(b"ascend_sim_counter\0")
    }
    .unwrap();
    // A folder of the user's may hold another library; one without calls counted is not ours.
    let count = |name: &str| {
        let name = CString::new(name).unwrap();
        // SAFETY:
        // * The name is ended by a zero and lives during the call.
        unsafe { counter(name.as_ptr()) }
    };
    assert!(count("aclrtCreateStreamWithConfig") > 0);
    let kinds = ["device_allocations", "host_allocations", "registrations", "streams", "events"];
    let kinds = kinds.into_iter().chain(["leaked", "violations"]);
    kinds.map(|kind| (kind, count(kind))).filter(|(_, count)| *count > 0).collect()
}

#[test]
fn random_sequences_have_the_results_of_the_host_backend() {
    run("sequences", &[("ASCEND_SIM_LINKS", "h2d,us=30;d2h,us=50")]);
}

pub(super) fn sequences() {
    let step = (0..26_u8, any::<u16>(), any::<u16>(), any::<u16>());
    let steps = prop::collection::vec(step, 1..80);
    let config = Config { cases: 150, failure_persistence: None, ..Config::default() };
    let mut copied = 0_u32;
    let tally = std::cell::RefCell::new(&mut copied);
    TestRunner::new(config)
        .run(&(steps, any::<u8>()), |(steps, order)| {
            let (mut plain, mut ascend) =
                (World::new(Machine::host().unwrap()), World::new(machine()));
            for step in steps {
                let (expected, seen) = (plain.step(step), ascend.step(step));
                prop_assert_eq!(&expected, &seen, "after {:?}", step);
                if matches!(step.0, 12..=18) && seen == Seen::Done(Ok(())) {
                    **tally.borrow_mut() += 1;
                }
            }
            prop_assert_eq!(plain.end(order), ascend.end(order));
            prop_assert_eq!(leftovers(), []);
            Ok(())
        })
        .unwrap();
    // Else the sequences would compare nothing.
    assert!(copied > 200, "{copied} copies");
}
