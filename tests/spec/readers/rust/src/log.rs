//! The records of a log, its keys, and how a reader follows: docs/LOG.md.

use std::collections::BTreeMap;

use flate2::{Crc, Decompress, FlushDecompress, Status};
use rmpv::Value;
use serde_json::{json, Value as Json};

use crate::{unhex, view_of, Reader};

const MAX_UNPACKED: usize = 512 << 10;
const LEASE_TTL: f64 = 30.0;

const BATCH: u64 = 0;
const CLEAR: u64 = 1;
const LEASE: u64 = 2;
const GONE: u64 = 3;
const STATE: u64 = 4;

struct Record {
    kind: u64,
    epoch: u64,
    seq: u64,
    payload: Vec<u8>,
    origin: u64,
    block_size: u64,
    more: bool,
    resync: bool,
}

impl Record {
    /// A record of the log, or why it is none.
    fn read(data: &[u8]) -> Result<Record, &'static str> {
        let end = data.len().checked_sub(5).ok_or("malformed")?;
        let (content, check) = data.split_at(end);
        if check[0] != 0xce {
            return Err("malformed");
        }
        let mut crc = Crc::new();
        crc.update(content);
        if crc.sum().to_be_bytes() != check[1..] {
            return Err("damaged");
        }
        let mut rest = data;
        let value = rmpv::decode::read_value(&mut rest).or(Err("malformed"))?;
        let row = value.as_array().filter(|row| rest.is_empty() && row.len() > 1).ok_or("malformed")?;
        if matches!(row[0], Value::Integer(schema) if schema.as_u64() != Some(2)) {
            return Err("other_schema");
        }
        Record::decode(row).ok_or("malformed")
    }

    fn decode(row: &[Value]) -> Option<Record> {
        (row.len() >= 11).then_some(())?;
        let number = |at: usize| row[at].as_u64().filter(|number| number >> 63 == 0);
        let Value::Binary(payload) = &row[4] else {
            return None;
        };
        let packed = row[9].as_bool()?;
        (row[0].is_u64() && number(1)? <= STATE).then_some(())?;
        ((1..1 << 53).contains(&number(2)?) && number(3)? < (1 << 26) - 1).then_some(())?;
        Some(Record {
            kind: number(1)?,
            epoch: number(2)?,
            seq: number(3)?,
            payload: if packed { unpack(payload)? } else { payload.clone() },
            origin: number(5)?,
            block_size: number(6)?,
            more: row[7].as_bool()?,
            resync: row[8].as_bool()?,
        })
    }

    fn fields(&self) -> Json {
        json!({
            "kind": self.kind,
            "epoch": self.epoch,
            "seq": self.seq,
            "payload": self.payload.len(),
            "origin": self.origin,
            "block_size": self.block_size,
            "more": self.more,
            "resync": self.resync,
        })
    }
}

/// The whole of what zlib has packed, which may not be larger than `MAX_UNPACKED`.
fn unpack(packed: &[u8]) -> Option<Vec<u8>> {
    let mut unpacking = Decompress::new(true);
    let mut whole = Vec::with_capacity(MAX_UNPACKED + 1);
    let status = unpacking.decompress_vec(packed, &mut whole, FlushDecompress::Finish);
    let all = unpacking.total_in() == packed.len() as u64;
    (status.ok()? == Status::StreamEnd && all && whole.len() <= MAX_UNPACKED).then_some(whole)
}

#[derive(Default)]
struct Follower {
    epoch: u64,
    next: u64,
    holds: &'static str,
    /// The state that comes is one that the reader has.
    known: bool,
    heard: f64,
    counted: BTreeMap<&'static str, u64>,
    blocks: Reader,
}

impl Follower {
    fn count(&mut self, reason: &'static str, number: u64) {
        *self.counted.entry(reason).or_default() += number;
    }

    fn void(&mut self) {
        self.holds = "nothing";
        self.blocks.copies.clear();
    }

    /// Nothing came up to now.
    fn expire(&mut self, now: f64) {
        if self.holds != "nothing" && now - self.heard >= LEASE_TTL {
            self.count("expired", 1);
            self.void();
        }
    }

    /// Take the next record of the log.
    fn take(&mut self, record: &Record, now: f64) {
        if record.epoch < self.epoch {
            if now - self.heard < LEASE_TTL {
                return self.count("old_epoch", 1);
            }
            self.expire(now);
            self.count("clock_set_back", 1);
            self.epoch = 0;
        }
        self.heard = now;
        if record.epoch > self.epoch {
            self.next = if self.epoch == 0 { record.seq } else { 0 };
            self.epoch = record.epoch;
            self.known = false;
            if self.holds != "nothing" {
                self.holds = "former";
            }
        }
        if record.seq < self.next {
            return self.count("double", 1);
        }
        if record.seq > self.next {
            self.count("lost", record.seq - self.next);
            self.known = false;
            self.void();
        }
        self.next = record.seq + 1;
        match record.kind {
            LEASE => {}
            GONE => self.void(),
            _ => self.given(record),
        }
    }

    fn given(&mut self, record: &Record) {
        if record.kind == CLEAR {
            self.known = self.holds == "all" && !record.resync;
        }
        if self.known && record.kind != BATCH {
            self.known = record.more;
            return self.count("known", 1);
        }
        let wanted = if record.kind == STATE { "part" } else { "all" };
        if record.kind != CLEAR && self.holds != wanted {
            self.count("unusable", 1);
            return self.void();
        }
        let part = record.kind != BATCH && record.more;
        self.holds = if part { "part" } else { "all" };
        self.blocks.apply(&vec![record.payload.clone()]);
    }
}

fn escape(name: &str) -> String {
    let escaped = |byte: u8| match byte {
        b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' | b'-' | b'_' | b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    match name {
        "" => "%".to_owned(),
        _ => name.bytes().map(escaped).collect(),
    }
}

fn unescape(segment: &str) -> Option<String> {
    let mut bytes = vec![];
    let mut rest = if segment == "%" { &[] } else { segment.as_bytes() };
    while let [first, behind @ ..] = rest {
        if *first == b'%' {
            let digits = std::str::from_utf8(behind.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &behind[2..];
        } else {
            bytes.push(*first);
            rest = behind;
        }
    }
    String::from_utf8(bytes).ok()
}

/// The stream of a key; none where no stream has it.
fn parse(key: &str) -> Option<Json> {
    let parts: Vec<&str> = key.split('.').collect();
    let ["kvbus", "v1", names @ .., rank] = parts.as_slice() else {
        return None;
    };
    let rank: u64 = rank.parse().ok().filter(|rank| *rank < 10_000_000_000)?;
    let names: Vec<String> = names.iter().map(|name| unescape(name)).collect::<Option<_>>()?;
    let [cluster, model, worker] = names.as_slice() else {
        return None;
    };
    let (c, m, w) = (escape(cluster), escape(model), escape(worker));
    let stream = json!({"cluster": cluster, "model": model, "worker": worker, "rank": rank});
    (format!("kvbus.v1.{c}.{m}.{w}.{rank}") == key).then_some(stream)
}

fn each<'a>(vector: &'a Json, what: &str) -> &'a [Json] {
    vector[what].as_array().map_or(&[], Vec::as_slice)
}

/// Say what differs from the vector; nothing if nothing does.
pub fn run(vector: &Json) -> String {
    let mut follower = Follower {
        holds: "nothing",
        ..Follower::default()
    };
    for (number, step) in each(vector, "steps").iter().enumerate() {
        let now = step["at"].as_f64().expect("seconds");
        let mut fields = Json::Null;
        follower.counted.clear();
        match step["record"].as_str().map(|data| Record::read(&unhex(data))) {
            None => follower.expire(now),
            Some(Err(reason)) => follower.count(reason, 1),
            Some(Ok(record)) => {
                follower.take(&record, now);
                fields = record.fields();
            }
        }
        let found = json!({
            "fields": fields,
            "counted": follower.counted,
            "holds": follower.holds,
            "epoch": follower.epoch,
            "next": follower.next,
        });
        let differs = |(name, value): (&String, &Json)| *value != step[name];
        if found.as_object().expect("a map").iter().any(differs) {
            return format!("step {number}: it has {found}, expected {step}");
        }
        let (view, wanted) = (follower.blocks.view(), view_of(step));
        if view != wanted {
            return format!("step {number}: it has {view:?}, expected {wanted:?}");
        }
    }
    for each in each(vector, "keys") {
        let found = parse(each["key"].as_str().expect("a key")).unwrap_or(Json::Null);
        if found != each["stream"] {
            return format!("it has {found}, expected {each}");
        }
    }
    if each(vector, "steps").is_empty() && each(vector, "keys").is_empty() {
        return "it has neither steps nor keys".to_owned();
    }
    String::new()
}
