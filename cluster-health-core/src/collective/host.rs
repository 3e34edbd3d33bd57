//! Collectives of the host backend: ranks write into each other's memfd-backed device memory.
#![allow(unsafe_code, reason = "ranks write into each other's memory")]

use std::time::Duration;

use super::copy::{copy, copy_to_both};
use super::types::{DataType, ReduceOp, reduce_into};
use crate::backend::memory::Mapping;
use crate::buffer::{DeviceBuffer, slice_of, slice_of_mut};
use crate::error::{Error, Result};
use crate::id::CpuId;
use crate::rank::RankGroup;
use crate::rank::board::Board;
use crate::rank::slots::LONGEST;

/// Blocks up to this size travel inside the message that announces them: two short copies are
/// quicker than waiting for the receiver to arrive.
const INLINE: usize = 4096;

/// Names the board's memory among the descriptors that ranks send each other. Buffers count up
/// from 1, so this is never one of theirs.
const BOARD_TAG: u64 = u64::MAX;

/// So many buffers of each other rank stay mapped. A mapping keeps the memory, also when its owner
/// has dropped the buffer. One operation uses two at most.
const MOST_MAPPED: usize = 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Operation {
    Done,
    Barrier,
    AllGather,
    AllReduce,
    ReduceScatter,
    Broadcast,
    AllToAll,
}

/// What all ranks must agree about in one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Call {
    operation: Operation,
    data_type: DataType,
    op: ReduceOp,
    count: usize,
    root: usize,
}

impl Call {
    fn new(operation: Operation, data_type: DataType, count: usize) -> Self {
        Self { operation, data_type, op: ReduceOp::Sum, count, root: 0 }
    }

    fn kind(self) -> u32 {
        u32::from(self.operation as u8)
            | u32::from(self.data_type as u8) << 8
            | u32::from(self.op as u8) << 16
    }

    fn bytes(self) -> Result<usize> {
        self.count
            .checked_mul(self.data_type.size())
            .ok_or_else(|| Error::invalid("count", "larger than the address space"))
    }
}

/// What a rank tells the others before they may write into its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Arrival {
    send: u64,
    receive: u64,
    count: u64,
    root: u64,
}

impl Arrival {
    const BYTES: usize = 32;

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (place, word) in
            bytes.chunks_exact_mut(8).zip([self.send, self.receive, self.count, self.root])
        {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != Self::BYTES {
            return None;
        }
        let mut words = [0_u64; 4];
        for (word, place) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            let mut raw = [0; 8];
            raw.copy_from_slice(place);
            *word = u64::from_ne_bytes(raw);
        }
        let [send, receive, count, root] = words;
        Some(Self { send, receive, count, root })
    }
}

#[derive(Debug)]
pub(super) struct HostCollectives<'g> {
    board: Board<'g>,
    /// Per rank its buffers that are mapped here, the one used last at the end.
    peers: Vec<Vec<(u64, Mapping)>>,
    /// Per rank the own buffers that it has mapped, in the same order: both sides see the same
    /// uses, so they let go of the same buffers.
    shared: Vec<Vec<u64>>,
    /// Number of sends to and receives from each rank.
    sent: Vec<u64>,
    received: Vec<u64>,
    /// An operation failed half way: the ranks no longer agree where they are.
    broken: bool,
}

impl<'g> HostCollectives<'g> {
    pub(super) fn new(group: &'g RankGroup) -> Result<Self> {
        let board = Board::new(group, BOARD_TAG)?;
        let size = board.size();
        Ok(Self {
            board,
            peers: (0..size).map(|_| Vec::new()).collect(),
            shared: vec![Vec::new(); size],
            sent: vec![0; size],
            received: vec![0; size],
            broken: false,
        })
    }

    pub(super) fn group(&self) -> &'g RankGroup {
        self.board.group()
    }

    pub(super) fn set_timeout(&mut self, timeout: Duration) {
        self.board.set_timeout(timeout);
    }

    pub(super) fn note_cpu(&self, cpu: CpuId) {
        self.board.note_cpu(cpu);
    }

    /// Runs one operation; after a failure the communicator refuses further ones.
    #[inline]
    fn run(&mut self, operation: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        if self.broken {
            return Err(Error::Busy(
                "an operation of this communicator failed before; make a new one".to_owned(),
            ));
        }
        let result = operation(self);
        self.broken = result.is_err();
        result
    }

    /// The other ranks, from the next one on, so that they do not all write to one rank first.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.board.rank(), self.board.size());
        (1..size).map(move |step| (rank + step) % size)
    }

    /// Gives a buffer to a rank that does not have it. That rank must use it in the same operation.
    fn share(&mut self, buffer: &DeviceBuffer, to: usize) -> Result<()> {
        let shared = &mut self.shared[to];
        if let Some(place) = shared.iter().rposition(|id| *id == buffer.id()) {
            shared[place..].rotate_left(1);
            return Ok(());
        }
        shared.push(buffer.id());
        if shared.len() > MOST_MAPPED {
            shared.remove(0);
        }
        let peer = u32::try_from(to).unwrap_or(u32::MAX);
        self.board.group().send_fd(peer, buffer.id(), buffer.file()?)
    }

    fn share_with_all(&mut self, buffer: &DeviceBuffer) -> Result<()> {
        self.others().try_for_each(|peer| self.share(buffer, peer))
    }

    /// Address of a rank's buffer here; at least `len` bytes are mapped. It is good until this was
    /// called for [`MOST_MAPPED`] more buffers of that rank.
    fn peer_address(&mut self, rank: usize, id: u64, len: usize) -> Result<*mut u8> {
        let known = &mut self.peers[rank];
        match known.iter().rposition(|(known, _)| *known == id) {
            Some(place) => known[place..].rotate_left(1),
            None => {
                let peer = u32::try_from(rank).unwrap_or(u32::MAX);
                let file = self.board.group().receive_fd(peer, id)?;
                known.push((id, Mapping::whole_file(file)?));
                if known.len() > MOST_MAPPED {
                    drop(known.remove(0));
                }
            }
        }
        let place = known.len() - 1;
        let mapping = &known[place].1;
        if mapping.len() < len {
            return Err(Error::rank_fault(
                u32::try_from(rank).unwrap_or(u32::MAX),
                format!("its buffer has {} bytes, the call needs {len}", mapping.len()),
            ));
        }
        Ok(mapping.address())
    }

    /// Another rank's message of the current exchange, which must be of the same call.
    #[inline]
    fn agreed(&self, rank: usize, call: Call) -> Result<&[u8]> {
        let message = self.board.message(rank)?;
        if message.kind == call.kind() {
            return Ok(message.bytes);
        }
        Err(disagreement(rank, call))
    }

    fn arrival(&self, rank: usize, call: Call) -> Result<Arrival> {
        let arrival = Arrival::from_bytes(self.agreed(rank, call)?);
        match arrival {
            Some(arrival)
                if arrival.count == call.count as u64 && arrival.root == call.root as u64 =>
            {
                Ok(arrival)
            }
            _ => Err(disagreement(rank, call)),
        }
    }

    fn arrive(&mut self, call: Call, send: u64, receive: u64) {
        let arrival = Arrival { send, receive, count: call.count as u64, root: call.root as u64 };
        self.board.publish(call.kind(), &arrival.to_bytes());
    }

    /// Every rank has finished its part.
    fn done(&mut self) -> Result<()> {
        let call = Call::new(Operation::Done, DataType::UInt8, 0);
        self.board.publish(call.kind(), &[]);
        for rank in self.others() {
            self.agreed(rank, call)?;
        }
        self.board.ready_next();
        Ok(())
    }

    pub(super) fn barrier(&mut self) -> Result<()> {
        self.run(|this| {
            let call = Call::new(Operation::Barrier, DataType::UInt8, 0);
            this.board.publish(call.kind(), &[]);
            for rank in this.others() {
                this.agreed(rank, call)?;
            }
            this.board.ready_next();
            Ok(())
        })
    }

    pub(super) fn all_gather(
        &mut self,
        send: Option<&DeviceBuffer>,
        receive: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
    ) -> Result<()> {
        let call = Call::new(Operation::AllGather, data_type, count);
        let len = call.bytes()?;
        let (rank, size) = (self.board.rank(), self.board.size());
        let own = part(receive, rank, size, len)?;
        let from = match send {
            Some(send) => part(send, 0, 1, len)?.cast_const(),
            None => own.cast_const(),
        };
        let base = receive.address();
        self.run(|this| {
            if len <= INLINE {
                // SAFETY:
                // * `from` was checked to have `len` bytes, and nothing writes them during the call.
                this.board.publish(call.kind(), unsafe { slice_of(from, len) });
                this.keep_own(from, own, len);
                for other in this.others() {
                    let bytes = this.agreed(other, call)?;
                    if bytes.len() != len {
                        return Err(disagreement(other, call));
                    }
                    // SAFETY:
                    // * Block `other` of the receive buffer, which was checked to have all.
                    let place = unsafe { base.add(other * len) };
                    // SAFETY:
                    // * `len` bytes on both sides, in different memory.
                    unsafe { copy(bytes.as_ptr(), place, len) };
                }
                this.board.ready_next();
                return Ok(());
            }
            this.share_with_all(receive)?;
            this.arrive(call, 0, receive.id());
            let pair = size == 2 && !std::ptr::eq(from, own);
            if !pair {
                this.keep_own(from, own, len);
            }
            for other in this.others() {
                let arrival = this.arrival(other, call)?;
                let target = this.peer_address(other, arrival.receive, size * len)?;
                // SAFETY:
                // * Block `rank` of the other's buffer, whose mapping was checked to have all; its
                //   owner waits in the same call and leaves that block to us.
                let target = unsafe { target.add(rank * len) };
                if pair {
                    // SAFETY:
                    // * `len` bytes on all sides, in different memory.
                    unsafe { copy_to_both(from, own, target, len) };
                } else {
                    // SAFETY:
                    // * `len` bytes on both sides, in different memory.
                    unsafe { copy(from, target, len) };
                }
            }
            this.done()
        })
    }

    /// This rank's own block, unless it stands where it belongs already.
    #[inline]
    fn keep_own(&self, from: *const u8, own: *mut u8, len: usize) {
        if !std::ptr::eq(from, own) {
            // SAFETY:
            // * Both were checked to have `len` bytes; they are of different buffers, since a
            //   receive buffer is borrowed mutably and a send buffer is not.
            unsafe { copy(from, own, len) };
        }
    }

    pub(super) fn all_to_all(
        &mut self,
        send: &DeviceBuffer,
        receive: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
    ) -> Result<()> {
        let call = Call::new(Operation::AllToAll, data_type, count);
        let len = call.bytes()?;
        let (rank, size) = (self.board.rank(), self.board.size());
        let own = part(receive, rank, size, len)?;
        let from = part(send, 0, size, len)?.cast_const();
        self.run(|this| {
            this.share_with_all(receive)?;
            this.arrive(call, 0, receive.id());
            // SAFETY:
            // * Block `rank` of the send buffer, which was checked to have all.
            this.keep_own(unsafe { from.add(rank * len) }, own, len);
            for other in this.others() {
                let arrival = this.arrival(other, call)?;
                let target = this.peer_address(other, arrival.receive, size * len)?;
                // Block `other` of ours and block `rank` of the other's buffer, both checked to have
                // all; the owner waits in the same call and leaves that block to us.
                let source = from.wrapping_add(other * len);
                let target = target.wrapping_add(rank * len);
                // SAFETY:
                // * `len` bytes on both sides, in different memory.
                unsafe { copy(source, target, len) };
            }
            this.done()
        })
    }

    pub(super) fn broadcast(
        &mut self,
        buffer: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
        root: u32,
    ) -> Result<()> {
        let root = self.other_or_self(root, "root")?;
        let call = Call { root, ..Call::new(Operation::Broadcast, data_type, count) };
        let len = call.bytes()?;
        let from = part(buffer, 0, 1, len)?.cast_const();
        self.run(|this| {
            if this.board.rank() != root {
                this.share(buffer, root)?;
            }
            this.arrive(call, 0, buffer.id());
            for other in this.others() {
                let arrival = this.arrival(other, call)?;
                if this.board.rank() == root {
                    let target = this.peer_address(other, arrival.receive, len)?;
                    // SAFETY:
                    // * `len` bytes on both sides, in different memory; the owner waits in the same
                    //   call.
                    unsafe { copy(from, target, len) };
                }
            }
            this.done()
        })
    }

    pub(super) fn reduce_scatter(
        &mut self,
        send: &DeviceBuffer,
        receive: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
        op: ReduceOp,
    ) -> Result<()> {
        let call = Call { op, ..Call::new(Operation::ReduceScatter, data_type, count) };
        let len = call.bytes()?;
        let (rank, size) = (self.board.rank(), self.board.size());
        let own = part(receive, 0, 1, len)?;
        part(send, 0, size, len)?;
        self.run(|this| {
            this.share_with_all(send)?;
            this.arrive(call, send.id(), 0);
            let mut sources = Vec::with_capacity(size);
            for other in 0..size {
                sources.push(this.source(other, call, send, size * len)?);
            }
            // SAFETY:
            // * `own` was checked to have `len` bytes; only this rank uses its receive buffer here.
            let into = unsafe { slice_of_mut(own, len) };
            // SAFETY:
            // * Sources were checked to have `size × len` bytes, and no rank writes its send buffer
            //   before all are done.
            unsafe { combine(&sources, rank * len, data_type, op, into) };
            this.done()
        })
    }

    pub(super) fn all_reduce(
        &mut self,
        send: Option<&DeviceBuffer>,
        receive: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
        op: ReduceOp,
    ) -> Result<()> {
        let call = Call { op, ..Call::new(Operation::AllReduce, data_type, count) };
        let len = call.bytes()?;
        let (rank, size) = (self.board.rank(), self.board.size());
        let own = part(receive, 0, 1, len)?;
        if let Some(send) = send {
            part(send, 0, 1, len)?;
        }
        let border = |rank: usize| count * rank / size * data_type.size();
        let (start, end) = (border(rank), border(rank + 1));
        self.run(|this| {
            let source: &DeviceBuffer = send.unwrap_or(receive);
            this.share_with_all(source)?;
            this.share_with_all(receive)?;
            this.arrive(call, source.id(), receive.id());
            let (mut sources, mut targets) = (Vec::with_capacity(size), Vec::with_capacity(size));
            for other in 0..size {
                sources.push(this.source(other, call, source, len)?);
                targets.push(if other == rank {
                    own
                } else {
                    let id = this.arrival(other, call)?.receive;
                    this.peer_address(other, id, len)?
                });
            }
            let mut chunk = vec![0; end - start];
            // SAFETY:
            // * Sources were checked to have `len` bytes; no rank writes into one before all have
            //   passed the exchange below.
            unsafe { combine(&sources, start, data_type, op, &mut chunk) };
            this.done()?;
            for target in targets {
                // SAFETY:
                // * The chunk's place, inside a buffer that was checked to have `len` bytes.
                let target = unsafe { target.add(start) };
                // SAFETY:
                // * `chunk.len()` bytes on both sides, in different memory; every rank writes its own
                //   chunk only.
                unsafe { copy(chunk.as_ptr(), target, chunk.len()) };
            }
            this.done()
        })
    }

    /// Address of a rank's send buffer here.
    fn source(
        &mut self,
        rank: usize,
        call: Call,
        own: &DeviceBuffer,
        len: usize,
    ) -> Result<*const u8> {
        if rank == self.board.rank() {
            return Ok(own.address().cast_const());
        }
        let id = self.arrival(rank, call)?.send;
        Ok(self.peer_address(rank, id, len)?.cast_const())
    }

    fn other_or_self(&self, rank: u32, what: &str) -> Result<usize> {
        let rank = rank as usize;
        if rank < self.board.size() {
            Ok(rank)
        } else {
            Err(Error::invalid(what, format!("there is no rank {rank}")))
        }
    }

    fn other(&self, rank: u32, what: &str) -> Result<usize> {
        let other = self.other_or_self(rank, what)?;
        if other == self.board.rank() {
            return Err(Error::invalid(what, "is this rank itself"));
        }
        Ok(other)
    }

    pub(super) fn send(
        &mut self,
        buffer: &DeviceBuffer,
        count: usize,
        data_type: DataType,
        to: u32,
    ) -> Result<()> {
        let to = self.other(to, "to")?;
        let call = Call::new(Operation::Done, data_type, count);
        let len = call.bytes()?;
        let from = part(buffer, 0, 1, len)?.cast_const();
        self.run(|this| {
            this.sent[to] += 1;
            let sequence = this.sent[to];
            let (id, bytes) = this.board.slots().posted(to, sequence)?;
            if bytes != len as u64 {
                let message = format!("receives {bytes} bytes, this rank sends {len}");
                return Err(Error::rank_fault(u32::try_from(to).unwrap_or(u32::MAX), message));
            }
            let target = this.peer_address(to, id, len)?;
            // SAFETY:
            // * `len` bytes on both sides, in different memory; the owner waits in `receive`.
            unsafe { copy(from, target, len) };
            this.board.slots().deliver(to, sequence);
            Ok(())
        })
    }

    pub(super) fn receive(
        &mut self,
        buffer: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
        from: u32,
    ) -> Result<()> {
        let from = self.other(from, "from")?;
        let call = Call::new(Operation::Done, data_type, count);
        let len = call.bytes()?;
        part(buffer, 0, 1, len)?;
        self.run(|this| {
            this.share(buffer, from)?;
            this.received[from] += 1;
            let sequence = this.received[from];
            this.board.slots().post(from, sequence, buffer.id(), len as u64);
            this.board.slots().delivered(from, sequence)
        })
    }
}

/// Combines the same chunk of all sources, in rank order, into `into`.
///
/// # Safety
/// Each source is valid for reads of `start + into.len()` bytes, and nothing writes them.
unsafe fn combine(
    sources: &[*const u8],
    start: usize,
    data_type: DataType,
    op: ReduceOp,
    into: &mut [u8],
) {
    for (index, source) in sources.iter().enumerate() {
        // SAFETY:
        // * Inside the source, as the caller vouches.
        let chunk = unsafe { source.add(start) };
        // SAFETY:
        // * As above, and nothing writes it.
        let chunk = unsafe { slice_of(chunk, into.len()) };
        if index == 0 {
            into.copy_from_slice(chunk);
        } else {
            reduce_into(data_type, op, into, chunk);
        }
    }
}

/// Address of block `index` in a buffer that must have `blocks` blocks of `len` bytes.
fn part(buffer: &DeviceBuffer, index: usize, blocks: usize, len: usize) -> Result<*mut u8> {
    let needed = blocks.checked_mul(len);
    if needed.is_none_or(|needed| needed > buffer.len()) {
        return Err(Error::invalid(
            "count",
            format!("{blocks} × {len} bytes in a buffer of {} bytes", buffer.len()),
        ));
    }
    // SAFETY:
    // * `index < blocks`, so the block starts inside the buffer (or one past it when `len` is 0).
    Ok(unsafe { buffer.address().add(index * len) })
}

fn disagreement(rank: usize, call: Call) -> Error {
    Error::rank_fault(
        u32::try_from(rank).unwrap_or(u32::MAX),
        format!(
            "is in another call than this rank, which is in {:?} of {} × {:?}",
            call.operation, call.count, call.data_type
        ),
    )
}

const _: () = assert!(INLINE <= LONGEST, "an inline block must fit a message");
