//! What ranks tell each other between visits.

use std::time::{Duration, Instant};

use cluster_health_core::rank::RankGroup;
use serde::Serialize;

use crate::error::{Error, Result};
use crate::observer::Observer;

/// Longest silence of another rank that is alive: each of its waits is bounded by itself.
const PATIENCE: Duration = Duration::from_secs(1200);

pub(crate) fn encode(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|error| Error::format("a message", error.to_string()))
}

pub(crate) fn decode<T: serde::de::DeserializeOwned>(rank: u32, message: &[u8]) -> Result<T> {
    serde_json::from_slice(message)
        .map_err(|error| Error::format(format!("what rank {rank} sent"), error.to_string()))
}

/// Waits for a rank as long as it lives.
pub(crate) fn hear(
    group: &RankGroup,
    from: u32,
    observer: &dyn Observer,
) -> Result<Option<Vec<u8>>> {
    let began = Instant::now();
    loop {
        match group.receive(from) {
            Err(cluster_health_core::Error::Rank { timed_out: true, .. })
                if began.elapsed() < PATIENCE =>
            {
                if group.rank() != 0 && observer.is_cancelled() {
                    return Ok(None);
                }
            }
            other => return Ok(Some(other?)),
        }
    }
}
