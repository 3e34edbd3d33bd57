//! The command line of cluster-health.
#![allow(clippy::print_stderr, reason = "the command line is what prints: logs to stderr")]

/// A line on stderr; that nobody reads it is no reason to stop.
macro_rules! log {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let text = cluster_health_matrix::output::printable(format!($($text)*));
        writeln!(std::io::stderr(), "{text}").ok();
    }};
}

mod args;
mod base;
mod bundle;
mod commands;
mod gate;
mod guard;
mod progress;

use std::io::Write as _;
use std::process::ExitCode;

use args::{Cli, Command};
use clap::Parser as _;
use cluster_health_matrix::Error;
use commands::Done;
use serde_json::json;

const USAGE: u8 = 2;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let json = match &cli.command {
        Command::All(args) => args.folder.output.json,
        Command::H2d(args) => args.folder.output.json,
        Command::CorePair(args) => args.folder.output.json,
        Command::Affinity(args) => args.output.json,
        Command::Env(args) => args.output.json,
        Command::Validate(args) => args.folder.output.json,
        Command::Sizes(args) => args.folder.output.json,
        Command::Policies(args) => args.folder.output.json,
        Command::Preflight(args) => args.output.json,
        Command::Plan(args) => args.output.json,
        Command::Diagnose(args) => args.output.json,
        Command::Report(args) => args.output.json,
        Command::Compare(args) => args.output.json,
        Command::Import(args) => args.output.json,
        Command::Export(args) => args.output.json,
    };
    match commands::run(&cli.command) {
        Ok(Done::Clean) => ExitCode::SUCCESS,
        Ok(Done::Wanting | Done::Differences) => ExitCode::from(1),
        Ok(Done::Refused) => ExitCode::from(USAGE),
        Err(error) => {
            if json {
                print_error(&error);
            }
            log!("cluster-health: {error}");
            ExitCode::from(USAGE)
        }
    }
}

/// Help and version are results; everything else clap says is a usage error.
fn usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        // A reader that closed the pipe has seen enough.
        error.print().ok();
        return ExitCode::SUCCESS;
    }
    let wants_json = std::env::args_os().any(|arg| arg == "--json")
        || std::env::var_os("CLUSTER_HEALTH_JSON").is_some_and(|value| {
            !matches!(value.to_str(), Some("" | "0" | "n" | "no" | "f" | "false" | "off"))
        });
    if wants_json {
        let text = error.render().to_string();
        let message = text.lines().next().unwrap_or_default();
        let message = message.strip_prefix("error: ").unwrap_or(message);
        print_json(&error_document("usage", message, None, None, None, None, None));
    }
    // To stderr, coloured only on a terminal.
    error.print().ok();
    ExitCode::from(USAGE)
}

fn error_document(
    kind: &str,
    message: &str,
    call: Option<&str>,
    code: Option<i64>,
    device: Option<u32>,
    rank: Option<u32>,
    advice: Option<&str>,
) -> serde_json::Value {
    json!({"schema_version": 1, "error": {
        "kind": kind, "message": message, "call": call, "code": code, "device": device,
        "rank": rank, "advice": advice,
    }})
}

fn print_error(error: &Error) {
    let message = error.to_string();
    let document = match error {
        Error::Core(core) => error_document(
            core.kind(),
            &message,
            core.call(),
            core.code(),
            core.device().map(|device| device.0),
            core.rank(),
            core.advice(),
        ),
        other => error_document(other.kind(), &message, None, None, None, None, None),
    };
    print_json(&document);
}

/// One document on stdout; a reader that closed the pipe has seen enough.
pub(crate) fn print_json(value: &serde_json::Value) {
    let text = serde_json::to_string_pretty(value).unwrap_or_default();
    // Inside of strings, where JSON itself escapes only the controls of ASCII.
    let mut safe = String::with_capacity(text.len() + 1);
    for c in text.chars() {
        if c == '\n' || !c.is_control() {
            safe.push(c);
        } else {
            safe.push_str(&format!("\\u{:04x}", u32::from(c)));
        }
    }
    safe.push('\n');
    std::io::stdout().write_all(safe.as_bytes()).ok();
}

/// Results as text, without what a terminal would obey.
pub(crate) fn print_text(text: &str) {
    let text = cluster_health_matrix::output::printable(text.to_owned());
    std::io::stdout().write_all(text.as_bytes()).ok();
}
