//! The device management interface: cards, health, processes, links. It knows physical ids only.
//!
//! The names of the second generation (`dcmiv2_`, by logic id) serve chips whose name starts with
//! `Ascend950`, those of the first all others; each refuses the other's chips.

use std::{
    ffi::c_char,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::{
    codes::{DCMI_DEVICE_NOT_EXIST, DCMI_NOT_READY, DCMI_NOT_SUPPORT, DCMI_PARAMETER},
    config::{self, Config},
    device,
    ffi::{Fail, Out, Outcome, exports, fail},
};

static READY: AtomicBool = AtomicBool::new(false);
static READY_2: AtomicBool = AtomicBool::new(false);

fn is_950() -> bool {
    config::get().soc.to_bytes().starts_with(b"Ascend950")
}

fn ready() -> Outcome {
    if !READY.load(Ordering::Acquire) {
        fail(DCMI_NOT_READY, "dcmi_init was not called")
    } else if is_950() {
        fail(DCMI_NOT_SUPPORT, "this chip has the second generation of names only")
    } else {
        Ok(())
    }
}

fn ready_2() -> Outcome {
    if !READY_2.load(Ordering::Acquire) {
        fail(DCMI_NOT_READY, "dcmiv2_init was not called")
    } else if is_950() {
        Ok(())
    } else {
        fail(DCMI_NOT_SUPPORT, "this chip has the first generation of names only")
    }
}

/// The physical id of a device of the second generation.
fn device_phy(config: &Config, device: i32) -> Result<u32, Fail> {
    ready_2()?;
    match u32::try_from(device) {
        Ok(logic) if logic < config.devices => Ok(device::phy_of(config, logic)),
        _ => absent(format!("no device {device}")),
    }
}

fn device_of_phy(phy: u32, device: &Out<u32>) -> Outcome {
    ready_2()?;
    match device::logic_of_phy(&config::get(), phy) {
        Some(logic) => device.set(logic),
        None => absent(format!("no device with the physical id {phy}")),
    }
}

fn driver_version(text: &Out<c_char>, len: u32) -> Outcome {
    let version = &config::get().driver;
    if (len as usize) <= version.len() {
        return fail(DCMI_PARAMETER, format!("len {len} is too small"));
    }
    text.set_text(version, len as usize)
}

fn health_of(config: &Config, phy: u32) -> u32 {
    config.health.get(&phy).copied().unwrap_or(0)
}

fn hbm_of(config: &Config, phy: u32) -> HbmInfo {
    let logic = device::logic_of_phy(config, phy).unwrap_or(0);
    let used = config.hbm_used + device::in_use(logic).unwrap_or(0);
    HbmInfo {
        total_mb: config.hbm >> 20,
        frequency: 1600,
        used_mb: used >> 20,
        temperature: 45,
        bandwidth_percent: 0,
    }
}

fn utilization_of(config: &Config, phy: u32, kind: i32) -> Result<u32, Fail> {
    match kind {
        2 | 12 | 13 => Ok(config.utilization.get(&phy).copied().unwrap_or(0)),
        3 | 4 | 6 | 10 => Ok(0),
        _ => fail(DCMI_PARAMETER, format!("input_type {kind}")),
    }
}

fn processes_of(config: &Config, phy: u32, list: &Out<ProcInfo>, count: &Out<i32>) -> Outcome {
    let logic = device::logic_of_phy(config, phy).unwrap_or(0);
    let own = device::in_use(logic).map(|bytes| (signed(std::process::id()), bytes));
    let others = config.processes.iter().filter(|(on, ..)| *on == phy).map(|&(_, pid, n)| (pid, n));
    let mut found = 0;
    for (at, (pid, bytes)) in others.chain(own).take(32).enumerate() {
        list.set_at(at, ProcInfo { pid, bytes })?;
        found += 1;
    }
    count.set(found)
}

fn absent<T>(what: impl Into<String>) -> Result<T, Fail> {
    fail(DCMI_DEVICE_NOT_EXIST, what)
}

/// The physical id of a chip; the chips of a card follow each other.
fn phy(config: &Config, card: i32, chip: i32) -> Result<u32, Fail> {
    ready()?;
    let (Ok(card), Ok(chip)) = (u32::try_from(card), u32::try_from(chip)) else {
        return fail(DCMI_PARAMETER, format!("card {card} chip {chip}"));
    };
    if chip >= config.chips_per_card {
        return absent(format!("card {card} has no chip {chip}"));
    }
    known(config, card.saturating_mul(config.chips_per_card).saturating_add(chip))
}

fn known(config: &Config, phy: u32) -> Result<u32, Fail> {
    ready()?;
    if device::logic_of_phy(config, phy).is_none() {
        return absent(format!("no device with the physical id {phy}"));
    }
    Ok(phy)
}

fn signed(id: u32) -> i32 {
    i32::try_from(id).unwrap_or(i32::MAX)
}

fn set_place(config: &Config, card: &Out<i32>, chip: &Out<i32>, phy: u32) -> Outcome {
    card.set(signed(phy / config.chips_per_card))?;
    chip.set(signed(phy % config.chips_per_card))
}

#[repr(C)]
pub(crate) struct PcieInfo {
    vendor: u32,
    subvendor: u32,
    device: u32,
    subdevice: u32,
    domain: i32,
    bus: u32,
    bus_device: u32,
    function: u32,
    reserve: [u8; 32],
}

#[repr(C)]
pub(crate) struct HbmInfo {
    total_mb: u64,
    frequency: u32,
    used_mb: u64,
    temperature: i32,
    bandwidth_percent: u32,
}

#[repr(C)]
pub(crate) struct ProcInfo {
    pid: i32,
    bytes: u64,
}

#[repr(C)]
pub(crate) struct EccInfo([u32; 7]);

#[repr(C)]
pub(crate) struct ChipInfo {
    kind: [u8; 32],
    name: [u8; 32],
    version: [u8; 32],
    cores: u32,
    npu: [u8; 32],
}

fn padded(text: &str) -> [u8; 32] {
    let mut room = [0; 32];
    for (to, from) in room.iter_mut().take(31).zip(text.bytes()) {
        *to = from;
    }
    room
}

exports! { Dcmi;
    fn dcmi_init() {
        READY.store(true, Ordering::Release);
        Ok(())
    }
    fn dcmi_get_driver_version(text: Out<c_char>, len: u32) {
        ready()?;
        driver_version(&text, len)
    }
    fn dcmi_get_card_list(count: Out<i32>, list: Out<i32>, len: i32) {
        ready()?;
        let config = config::get();
        let mut cards: Vec<u32> = (0..config.devices)
            .map(|logic| device::phy_of(&config, logic) / config.chips_per_card)
            .collect();
        cards.sort_unstable();
        cards.dedup();
        if !(1..=64).contains(&len) || cards.len() > usize::try_from(len).unwrap_or(0) {
            return fail(DCMI_PARAMETER, format!("list_len {len}"));
        }
        for (at, &card) in cards.iter().enumerate() {
            list.set_at(at, signed(card))?;
        }
        count.set(i32::try_from(cards.len()).unwrap_or(i32::MAX))
    }
    fn dcmi_get_device_num_in_card(card: i32, count: Out<i32>) {
        let config = config::get();
        let chips = (0..config.chips_per_card).filter(|&chip| phy(&config, card, signed(chip)).is_ok());
        match chips.count() {
            0 => {
                ready()?;
                absent(format!("no card {card}"))
            }
            chips => count.set(i32::try_from(chips).unwrap_or(i32::MAX)),
        }
    }
    fn dcmi_get_device_id_in_card(card: i32, max: Out<i32>, mcu: Out<i32>, cpu: Out<i32>) {
        let config = config::get();
        phy(&config, card, 0)?;
        max.set(signed(config.chips_per_card))?;
        mcu.set(-1)?;
        cpu.set(-1)
    }
    fn dcmi_get_device_health(card: i32, chip: i32, health: Out<u32>) {
        let config = config::get();
        let phy = phy(&config, card, chip)?;
        health.set(health_of(&config, phy))
    }
    fn dcmi_get_device_errorcode_v2(
        card: i32,
        chip: i32,
        count: Out<i32>,
        list: Out<u32>,
        len: u32,
    ) {
        let config = config::get();
        let phy = phy(&config, card, chip)?;
        if len == 0 || len > 128 {
            return fail(DCMI_PARAMETER, format!("list_len {len}"));
        }
        match health_of(&config, phy) {
            0 => count.set(0),
            level => {
                list.set(0x80e0_1800 + level)?;
                count.set(1)
            }
        }
    }
    fn dcmi_get_device_pcie_info_v2(card: i32, chip: i32, info: Out<PcieInfo>) {
        let phy = phy(&config::get(), card, chip)?;
        info.set(PcieInfo {
            vendor: 0x19e5,
            subvendor: 0x19e5,
            device: 0xd802,
            subdevice: 0x3004,
            domain: 0,
            bus: (0x10 + phy) & 0xff,
            bus_device: 0,
            function: 0,
            reserve: [0; 32],
        })
    }
    fn dcmi_get_device_hbm_info(card: i32, chip: i32, info: Out<HbmInfo>) {
        let config = config::get();
        let phy = phy(&config, card, chip)?;
        info.set(hbm_of(&config, phy))
    }
    fn dcmi_get_device_utilization_rate(card: i32, chip: i32, kind: i32, percent: Out<u32>) {
        let config = config::get();
        let phy = phy(&config, card, chip)?;
        percent.set(utilization_of(&config, phy, kind)?)
    }
    fn dcmi_get_device_resource_info(card: i32, chip: i32, list: Out<ProcInfo>, count: Out<i32>) {
        let config = config::get();
        let phy = phy(&config, card, chip)?;
        processes_of(&config, phy, &list, &count)
    }
    fn dcmi_get_topo_info_by_device_id(
        card: i32,
        chip: i32,
        other_card: i32,
        other_chip: i32,
        kind: Out<i32>,
    ) {
        let config = config::get();
        let (a, b) = (phy(&config, card, chip)?, phy(&config, other_card, other_chip)?);
        kind.set(if a == b { 0 } else { config.topo.get(&(a, b)).copied().unwrap_or(3) })
    }
    fn dcmi_get_device_temperature(card: i32, chip: i32, celsius: Out<i32>) {
        phy(&config::get(), card, chip)?;
        celsius.set(45)
    }
    fn dcmi_get_device_power_info(card: i32, chip: i32, tenth_watts: Out<i32>) {
        phy(&config::get(), card, chip)?;
        tenth_watts.set(900)
    }
    fn dcmi_get_device_ecc_info(card: i32, chip: i32, kind: u32, info: Out<EccInfo>) {
        phy(&config::get(), card, chip)?;
        if kind != 2 {
            return fail(DCMI_NOT_SUPPORT, format!("device type {kind}"));
        }
        info.set(EccInfo([1, 0, 0, 0, 0, 0, 0]))
    }
    fn dcmi_get_device_network_health(card: i32, chip: i32, result: Out<u32>) {
        phy(&config::get(), card, chip)?;
        result.set(0)
    }
    fn dcmi_get_device_frequency(card: i32, chip: i32, kind: u32, mhz: Out<u32>) {
        phy(&config::get(), card, chip)?;
        mhz.set(if kind == 1 { 1600 } else { 1800 })
    }
    fn dcmi_get_device_chip_info_v2(card: i32, chip: i32, info: Out<ChipInfo>) {
        let config = config::get();
        phy(&config, card, chip)?;
        let soc = config.soc.to_string_lossy();
        info.set(ChipInfo {
            kind: padded("Ascend"),
            name: padded(soc.strip_prefix("Ascend").unwrap_or(&soc)),
            version: padded("V1"),
            cores: 20,
            npu: padded(&soc),
        })
    }
    fn dcmi_get_device_logic_id(logic: Out<i32>, card: i32, chip: i32) {
        let config = config::get();
        let phy = phy(&config, card, chip)?;
        match device::logic_of_phy(&config, phy) {
            Some(found) => logic.set(signed(found)),
            None => absent(format!("no device with the physical id {phy}")),
        }
    }
    fn dcmi_get_device_phyid_from_logicid(logic: u32, phy: Out<u32>) {
        ready()?;
        let config = config::get();
        if logic >= config.devices {
            return absent(format!("no logic device {logic}"));
        }
        phy.set(device::phy_of(&config, logic))
    }
    fn dcmi_get_device_logicid_from_phyid(phy: u32, logic: Out<u32>) {
        let config = config::get();
        let phy = known(&config, phy)?;
        logic.set(device::logic_of_phy(&config, phy).unwrap_or(0))
    }
    fn dcmi_get_card_id_device_id_from_logicid(card: Out<i32>, chip: Out<i32>, logic: u32) {
        ready()?;
        let config = config::get();
        if logic >= config.devices {
            return absent(format!("no logic device {logic}"));
        }
        set_place(&config, &card, &chip, device::phy_of(&config, logic))
    }
    fn dcmi_get_card_id_device_id_from_phyid(card: Out<i32>, chip: Out<i32>, phy: u32) {
        let config = config::get();
        let phy = known(&config, phy)?;
        set_place(&config, &card, &chip, phy)
    }
    fn dcmiv2_init() {
        READY_2.store(true, Ordering::Release);
        Ok(())
    }
    fn dcmiv2_get_driver_version(text: Out<c_char>, len: u32) {
        ready_2()?;
        driver_version(&text, len)
    }
    fn dcmiv2_get_device_list(list: Out<i32>, count: Out<i32>, len: i32) {
        ready_2()?;
        let devices = signed(config::get().devices);
        if devices > len {
            return fail(DCMI_PARAMETER, format!("list_len {len}"));
        }
        for (at, device) in (0..devices).enumerate() {
            list.set_at(at, device)?;
        }
        count.set(devices)
    }
    fn dcmiv2_get_device_health(device: i32, health: Out<u32>) {
        let config = config::get();
        let phy = device_phy(&config, device)?;
        health.set(health_of(&config, phy))
    }
    fn dcmiv2_get_device_hbm_info(device: i32, info: Out<HbmInfo>) {
        let config = config::get();
        let phy = device_phy(&config, device)?;
        info.set(hbm_of(&config, phy))
    }
    fn dcmiv2_get_device_utilization_rate(device: i32, kind: i32, percent: Out<u32>) {
        let config = config::get();
        let phy = device_phy(&config, device)?;
        percent.set(utilization_of(&config, phy, kind)?)
    }
    fn dcmiv2_get_device_proc_mem_info(device: i32, list: Out<ProcInfo>, count: Out<i32>) {
        let config = config::get();
        let phy = device_phy(&config, device)?;
        processes_of(&config, phy, &list, &count)
    }
    fn dcmiv2_get_dev_id_by_chip_phy_id(phy: u32, device: Out<u32>) {
        device_of_phy(phy, &device)
    }
    fn dcmiv2_get_dev_id_from_chip_phyid(phy: u32, device: Out<u32>) {
        device_of_phy(phy, &device)
    }
}
