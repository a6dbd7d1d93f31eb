//! Sockets of a router or an engine on the crate `zeromq`, for tests. The program prints the messages that it gets.
//!
//! ```text
//! peer SECONDS subscribe connect|bind ENDPOINT TOPIC
//! peer SECONDS publish connect|bind ENDPOINT ""           (sends a message for each line FRAME,FRAME...)
//! peer SECONDS ask dealer|req ENDPOINT FRAME,FRAME...     (frames in hex)
//! ```
//!
//! Each printed line is a JSON object with the kind of event ("started", "connected", "disconnected", "error" or
//! "message") and the frames of a message in hex. The program ends after SECONDS, or when its input ends.

use std::io::{Read, Write};
use std::time::Duration;

use futures::StreamExt;
use tokio::io::{AsyncBufReadExt, BufReader};
use zeromq::{
    DealerSocket, PubSocket, ReqSocket, Socket, SocketEvent, SocketRecv, SocketSend, SubSocket, ZmqMessage, ZmqResult,
};

fn print(what: &str, more: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{{\"what\": \"{what}\"{more}}}").expect("a reader");
    out.flush().expect("a reader");
}

fn hex(frame: &[u8]) -> String {
    frame.iter().map(|value| format!("{value:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("hex"))
        .collect()
}

fn request(frames: &str) -> ZmqMessage {
    let mut frames = frames.split(',').map(unhex);
    let mut message = ZmqMessage::from(frames.next().expect("a frame at least"));
    frames.for_each(|frame| message.push_back(frame.into()));
    message
}

/// Print a line for each new and each lost connection.
fn watch(socket: &mut impl Socket) {
    let mut events = socket.monitor();
    tokio::spawn(async move {
        while let Some(event) = events.next().await {
            match event {
                SocketEvent::Connected(..) | SocketEvent::Accepted(..) => print("connected", ""),
                SocketEvent::Disconnected(..) => print("disconnected", ""),
                _ => {}
            }
        }
    });
}

fn received(message: ZmqResult<ZmqMessage>) {
    match message {
        Ok(message) => {
            let frames: Vec<_> = message.iter().map(|frame| format!("\"{}\"", hex(frame))).collect();
            print("message", &format!(", \"frames\": [{}]", frames.join(", ")));
        }
        Err(error) => print("error", &format!(", \"error\": {:?}", error.to_string())),
    }
}

async fn read(mut socket: impl SocketRecv) {
    print("started", "");
    loop {
        received(socket.recv().await);
    }
}

async fn run(arguments: &[String]) -> ZmqResult<()> {
    let [what, how, endpoint, data] = arguments else {
        panic!("arguments: {arguments:?}");
    };
    match (what.as_str(), how.as_str()) {
        ("subscribe", how) => {
            let mut socket = SubSocket::new();
            watch(&mut socket);
            socket.subscribe(data).await?;
            match how {
                "bind" => drop(socket.bind(endpoint).await?),
                _ => socket.connect(endpoint).await?,
            }
            read(socket).await;
        }
        ("publish", how) => {
            let mut socket = PubSocket::new();
            watch(&mut socket);
            match how {
                "bind" => drop(socket.bind(endpoint).await?),
                _ => socket.connect(endpoint).await?,
            }
            print("started", "");
            let mut lines = BufReader::new(tokio::io::stdin()).lines();
            while let Some(line) = lines.next_line().await? {
                socket.send(request(&line)).await?;
            }
        }
        ("ask", "dealer") => {
            let mut socket = DealerSocket::new();
            watch(&mut socket);
            socket.connect(endpoint).await?;
            socket.send(request(data)).await?;
            read(socket).await;
        }
        ("ask", "req") => {
            let mut socket = ReqSocket::new();
            watch(&mut socket);
            socket.connect(endpoint).await?;
            print("started", "");
            socket.send(request(data)).await?;
            received(socket.recv().await);
            std::future::pending::<()>().await;
        }
        _ => panic!("arguments: {arguments:?}"),
    }
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let seconds = arguments[0].parse().expect("seconds");
    // the input ends with the program that started this one; a publisher reads its input itself
    if arguments[1] != "publish" {
        std::thread::spawn(|| {
            while !matches!(std::io::stdin().read(&mut [0]), Ok(0) | Err(_)) {}
            std::process::exit(0);
        });
    }
    match tokio::time::timeout(Duration::from_secs(seconds), run(&arguments[1..])).await {
        Ok(Err(error)) => panic!("{error}"),
        _ => std::process::exit(0),
    }
}
