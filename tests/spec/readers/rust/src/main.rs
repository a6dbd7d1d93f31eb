//! A reader of KV-cache events that runs the vectors of docs/spec: a set of blocks and no socket, on the crate `rmpv`.
//!
//! ```text
//! reader DIRECTORY        each vector: what differs from its view, if anything; exit status 1 if one does
//! reader log DIRECTORY    the same for the vectors of a log
//! ```

mod log;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rmpv::Value;
use serde_json::Value as Json;

type Frames = Vec<Vec<u8>>;

const MEDIA: &str = "GPU CPU CPU_PINNED CPU_TIER1 CPU_TIER2 FS DISK NVME STORAGE OBJ EXTERNAL REMOTE NETWORK SHARED";
const STORED: &str =
    "type block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx";
const REMOVED: &str = "type block_hashes medium group_idx";

/// What a block is known by (8.1): group, medium, hash. A hash of 64 bits is unsigned (6.6), or bytes in hexadecimal.
type Key = (Option<i64>, String, String);

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("hex"))
        .collect()
}

fn hash_of(value: &Value) -> Option<String> {
    match value {
        Value::Integer(number) => {
            let bits = number
                .as_u64()
                .or_else(|| number.as_i64().map(|signed| signed as u64))?;
            Some(bits.to_string())
        }
        Value::Binary(bytes) if (1..=64).contains(&bytes.len()) => Some(hex(bytes)),
        _ => None,
    }
}

/// A medium's name in capitals, every device GPU; none for one that is unknown (9.1).
fn medium_of(value: Option<&Value>) -> Option<String> {
    let name = match value {
        None | Some(Value::Nil) => return Some("GPU".to_owned()),
        Some(value) => value.as_str()?.to_uppercase(),
    };
    match name.as_str() {
        "DEVICE" => Some("GPU".to_owned()),
        known if MEDIA.split(' ').any(|medium| medium == known) => Some(name),
        _ => None,
    }
}

/// The number of a message, in the last frame but one (2.2, 4.2).
fn sequence(frames: &Frames) -> Option<u64> {
    let frame = frames.len().checked_sub(2).map(|at| &frames[at])?;
    if frame.len() != 8 && frame.len() != 24 {
        return None;
    }
    let seq = u64::from_be_bytes(frame[..8].try_into().expect("eight bytes"));
    (seq < 1 << 63).then_some(seq)
}

/// The fields of an event by name (6.2): those of a map, or of an array by their places.
fn named(event: &Value) -> BTreeMap<&str, &Value> {
    match event {
        Value::Map(pairs) => pairs
            .iter()
            .filter_map(|(name, value)| Some((name.as_str()?, value)))
            .collect(),
        Value::Array(row) => {
            let removed = row.first().and_then(Value::as_str) == Some("BlockRemoved");
            let names = if removed { REMOVED } else { STORED };
            names.split(' ').zip(row).collect()
        }
        _ => BTreeMap::new(),
    }
}

/// Whether it is a token id, or a pair of them (6.9).
fn is_token(token: &Value) -> bool {
    match token.as_array() {
        Some(pair) => pair.len() == 2 && pair.iter().all(|each| !each.is_array() && is_token(each)),
        None => token.as_u64().is_some_and(|id| id < 1 << 32),
    }
}

#[derive(Default)]
struct Reader {
    next: u64,
    asks: Option<u64>,
    waiting: Vec<Frames>,
    copies: BTreeMap<Key, u64>,
}

impl Reader {
    /// Take a message of the SUB socket (2.1, 2.2, 3.4, 3.5).
    fn live(&mut self, frames: Frames) {
        let Some(seq) = sequence(&frames).filter(|_| frames.len() == 3) else {
            return;
        };
        if seq == self.next {
            self.apply(&frames);
        } else if seq > self.next {
            self.asks.get_or_insert(self.next);
            self.waiting.push(frames);
        }
    }

    /// Take a message of the DEALER socket (4.2); END has no number.
    fn replayed(&mut self, frames: &Frames) {
        if sequence(frames) == Some(self.next) {
            self.apply(frames);
        }
        while self
            .waiting
            .first()
            .is_some_and(|first| sequence(first) <= Some(self.next))
        {
            let first = self.waiting.remove(0);
            if sequence(&first) == Some(self.next) {
                self.apply(&first);
            }
        }
    }

    /// Apply the next batch. One that cannot be read has its number all the same (6.13).
    fn apply(&mut self, frames: &Frames) {
        self.next += 1;
        let mut payload = frames.last().expect("a payload").as_slice();
        let Ok(batch) = rmpv::decode::read_value(&mut payload) else {
            return;
        };
        let Some(events) = batch.as_array().and_then(|batch| batch.get(1)?.as_array()) else {
            return;
        };
        if payload.is_empty() {
            events.iter().for_each(|event| {
                self.event(&named(event));
            });
        }
    }

    /// Apply one event; none where it cannot be read.
    fn event(&mut self, event: &BTreeMap<&str, &Value>) -> Option<()> {
        let kind = event.get("type")?.as_str()?;
        if kind == "AllBlocksCleared" {
            self.copies.clear();
            return Some(());
        }
        let group = event.get("group_idx").and_then(|group| group.as_i64());
        let medium = medium_of(event.get("medium").copied())?;
        let hashes = event.get("block_hashes")?.as_array()?;
        let keys: Vec<Key> = hashes
            .iter()
            .map(|hash| Some((group, medium.clone(), hash_of(hash)?)))
            .collect::<Option<_>>()?;
        match kind {
            "BlockStored" => {
                let tokens = event.get("token_ids")?.as_array()?;
                let size = event.get("block_size")?.as_u64()?;
                if (keys.len() as u64).checked_mul(size)? == tokens.len() as u64 && tokens.iter().all(is_token) {
                    keys.into_iter()
                        .for_each(|key| *self.copies.entry(key).or_default() += 1);
                }
            }
            "BlockRemoved" => {
                for key in keys {
                    let left = self.copies.get(&key).copied().unwrap_or(0);
                    if left > 1 {
                        self.copies.insert(key, left - 1);
                    } else {
                        self.copies.remove(&key);
                    }
                }
            }
            _ => {}
        }
        Some(())
    }

    /// The blocks that are live.
    fn view(&self) -> BTreeSet<Key> {
        self.copies.keys().cloned().collect()
    }
}

fn messages(value: &Json) -> Vec<Frames> {
    let frames = |message: &Json| -> Frames {
        message
            .as_array()
            .expect("frames")
            .iter()
            .map(|frame| unhex(frame.as_str().expect("hex")))
            .collect()
    };
    value.as_array().map_or(vec![], |all| all.iter().map(frames).collect())
}

fn expected(block: &Json) -> Key {
    let hash = match &block["hash"] {
        Json::String(bytes) => bytes.clone(),
        number => number
            .as_u64()
            .unwrap_or_else(|| number.as_i64().expect("64 bits") as u64)
            .to_string(),
    };
    (
        block["group"].as_i64(),
        block["medium"].as_str().expect("a name").to_owned(),
        hash,
    )
}

/// The same of a vector's view.
fn view_of(vector: &Json) -> BTreeSet<Key> {
    let blocks = vector["view"].as_array().expect("a view");
    blocks.iter().map(expected).collect()
}

/// Say what differs from the vector; nothing if nothing does.
fn run(vector: &Json) -> String {
    let mut reader = Reader::default();
    messages(&vector["live"])
        .into_iter()
        .for_each(|message| reader.live(message));
    let asks = vector["asks"].as_u64();
    if reader.asks.is_some() != asks.is_some() || reader.asks > asks {
        return "it asks for another replay".to_owned();
    }
    messages(&vector["replay"])
        .iter()
        .for_each(|message| reader.replayed(message));
    let (found, view) = (reader.view(), view_of(vector));
    if found == view {
        String::new()
    } else {
        format!("it has {found:?}, expected {view:?}")
    }
}

fn main() {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let run = match arguments.first().is_some_and(|first| first == "log") {
        true => log::run,
        false => run,
    };
    let directory = arguments.pop().expect("a directory");
    let files = std::fs::read_dir(directory)
        .expect("a directory")
        .map(|entry| entry.expect("an entry").path());
    let is_json = |path: &Path| path.extension().is_some_and(|extension| extension == "json");
    let vectors: BTreeSet<_> = files.filter(|path| is_json(path)).collect();
    let mut wrong = vectors.is_empty();
    for path in vectors {
        let text = std::fs::read_to_string(&path).expect("a file");
        let said = run(&serde_json::from_str(&text).expect("JSON"));
        wrong |= !said.is_empty();
        println!("{}: {said}", path.file_stem().expect("a name").to_string_lossy());
    }
    std::process::exit(i32::from(wrong));
}
