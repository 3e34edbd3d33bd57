//! `env`: what this machine has, for a report.

use std::fmt::Write as _;

use cluster_health_core::activity::FailedCall;
use cluster_health_core::{AscendInventory, DeviceActivity, Machine};
use cluster_health_matrix::environment::Environment;
use cluster_health_matrix::run::{DeviceRecord, Manifest, PlanRecord, Tool, utc_now};
use cluster_health_matrix::{Error, Result};
use serde::Serialize;

use crate::args::EnvArgs;
use crate::commands::Done;
use crate::{print_json, print_text};

/// The document of `env --json`.
#[derive(Debug, Serialize)]
struct Bundle {
    schema_version: u32,
    tool: Tool,
    created_at: String,
    /// Why the backend that was asked for cannot be used.
    problem: Option<String>,
    environment: Environment,
    devices: Vec<DeviceRecord>,
    device_activity: Vec<DeviceActivity>,
    ascend: AscendInventory,
}

pub(crate) fn env(args: &EnvArgs) -> Result<Done> {
    let bundle = take(&args.backend.backend)?;
    if args.output.json {
        print_json(
            &serde_json::to_value(&bundle)
                .map_err(|error| Error::output("the bundle", error.to_string()))?,
        );
    } else {
        print_text(&text(&bundle));
    }
    Ok(Done::Clean)
}

fn take(backend: &str) -> Result<Bundle> {
    let (machine, problem) = match Machine::by_name(backend) {
        Ok(machine) => (machine, None),
        // That it is not there is what the bundle is to tell.
        Err(error) if backend == "ascend" => (Machine::host()?, Some(error.to_string())),
        Err(error) => return Err(error.into()),
    };
    let mut manifest = Manifest::of_machine("env", PlanRecord::default(), &machine);
    let mut device_activity = machine.device_activity();
    if problem.is_some() {
        // The CPUs are this machine's, the devices those of another backend.
        manifest.environment.backend = backend.to_owned();
        manifest.devices.clear();
        device_activity.clear();
    }
    Ok(Bundle {
        schema_version: manifest.schema_version,
        tool: manifest.tool,
        created_at: utc_now(),
        problem,
        environment: manifest.environment,
        devices: manifest.devices,
        device_activity,
        ascend: AscendInventory::take(),
    })
}

/// Further lines of a text that begins inside a list.
fn indent(text: &str) -> String {
    text.replace('\n', "\n    ")
}

fn describe(device: &DeviceActivity) -> String {
    let mut text = format!("device {}:", device.device);
    let known = |value: Option<u64>| value.map_or("unknown".to_owned(), |value| value.to_string());
    let mebibytes = |bytes: Option<u64>| known(bytes.map(|bytes| bytes >> 20));
    write!(
        text,
        " health {}, {} of {} MiB used, cores busy {} %",
        known(device.health.map(u64::from)),
        mebibytes(device.memory_used_bytes),
        mebibytes(device.memory_bytes),
        known(device.utilisation_percent.map(u64::from)),
    )
    .ok();
    match device.processes.as_deref() {
        None => text.push_str(", processes unknown"),
        Some([]) => text.push_str(", no other process"),
        Some(list) => {
            let list: Vec<String> = list.iter().map(ToString::to_string).collect();
            write!(text, ", other processes: {}", list.join(", ")).ok();
        }
    }
    text
}

fn ascend(inventory: &AscendInventory, line: &mut impl FnMut(String)) {
    line("\nAscend software".to_owned());
    let software = &inventory.software;
    for (name, version) in
        [("driver", &software.driver), ("runtime", &software.runtime), ("chips", &software.soc)]
    {
        line(format!("  {name}: {}", version.as_deref().unwrap_or("unknown")));
    }
    for (name, version) in &software.packages {
        line(format!("  package {name}: {version}"));
    }
    for library in &inventory.libraries {
        if let Some(problem) = &library.problem {
            line(format!("  {}", indent(problem)));
            continue;
        }
        let paths: Vec<String> =
            library.paths.iter().map(|path| path.display().to_string()).collect();
        line(format!("  {}: {}", library.name, paths.join(", ")));
        line(format!(
            "    {} functions found, {} missing: {}",
            library.found.len(),
            library.missing.len(),
            if library.missing.is_empty() { "none".to_owned() } else { library.missing.join(" ") }
        ));
    }
    for device in &inventory.devices {
        line(format!(
            "  runtime id {}: physical id {}, PCI address {}",
            device.runtime_id,
            device.physical_id.map_or("unknown".to_owned(), |id| id.to_string()),
            device.pci_address.as_deref().unwrap_or("unknown")
        ));
    }
    for [card, chips] in &inventory.cards {
        line(format!("  card {card}: {chips} chips"));
    }
}

fn text(bundle: &Bundle) -> String {
    let mut lines = Vec::new();
    let mut line = |text: String| lines.push(text);
    let environment = &bundle.environment;
    line(format!("cluster-health {} · {}", bundle.tool.version, bundle.created_at));
    line(format!("backend {}", environment.backend));
    if let Some(problem) = &bundle.problem {
        line(format!("problem: {problem}"));
    }
    line("\nenvironment".to_owned());
    if let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(environment) {
        // What has a section of its own, and what says nothing.
        let shown = fields.iter().filter(|(name, value)| {
            !value.is_null()
                && !["backend", "ascend", "variables", "scenario"].contains(&name.as_str())
        });
        for (name, value) in shown {
            let value = value.as_str().map_or_else(|| value.to_string(), indent);
            line(format!("  {name}: {value}"));
        }
    }
    for (name, value) in &environment.variables {
        line(format!("  {name}={value}"));
    }
    line("\ndevices (physical id, runtime id, name)".to_owned());
    for device in &bundle.devices {
        let node = device.numa_node.map_or(String::new(), |node| format!(", NUMA node {node}"));
        line(format!("  {} {} {}{node}", device.id, device.runtime_id, device.name));
    }
    for device in &bundle.device_activity {
        line(format!("  {}", describe(device)));
    }
    ascend(&bundle.ascend, &mut line);
    let asked = bundle.device_activity.iter().flat_map(|device| &device.failures);
    let failed: Vec<&FailedCall> = bundle.ascend.failures.iter().chain(asked).collect();
    if !failed.is_empty() {
        line("\ncalls that failed".to_owned());
    }
    for failure in failed {
        line(format!("  {}: {}", failure.call, indent(&failure.message)));
    }
    let mut text = lines.join("\n");
    text.push('\n');
    text
}
