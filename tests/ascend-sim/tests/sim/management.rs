//! DCMI.

use std::ptr;

use crate::library::{ProcMem, Sim};

#[test]
fn cards_are_physical_and_ignore_what_is_visible() {
    let settings = [
        ("DEVICES", "4"),
        ("CHIPS_PER_CARD", "2"),
        ("ASCEND_RT_VISIBLE_DEVICES", "3"),
        ("HEALTH", "3=2"),
        ("TOPO", "0-1=6"),
        ("DRIVER", "24.1.rc3"),
    ];
    let sim = Sim::new(&settings);
    let (mut count, mut list) = (0, [-1; 64]);
    assert_eq!(sim.dcmi_get_card_list(&raw mut count, list.as_mut_ptr(), 64), -8012);
    assert_eq!(sim.dcmi_init(), 0);
    assert_eq!(sim.dcmi_get_card_list(&raw mut count, list.as_mut_ptr(), 64), 0);
    assert_eq!((count, &list[..2]), (2, &[0, 1][..]));
    let (mut card, mut chip) = (-1, -1);
    assert_eq!(sim.dcmi_get_card_id_device_id_from_phyid(&raw mut card, &raw mut chip, 3), 0);
    assert_eq!((card, chip), (1, 1));
    assert_eq!(sim.dcmi_get_card_id_device_id_from_phyid(&raw mut card, &raw mut chip, 4), -8008);
    let mut health = 9;
    assert_eq!(sim.dcmi_get_device_health(1, 1, &raw mut health), 0);
    assert_eq!(health, 2);
    assert_eq!(sim.dcmi_get_device_health(0, 0, &raw mut health), 0);
    assert_eq!(health, 0);
    assert_eq!(sim.dcmi_get_device_health(0, 0, ptr::null_mut()), -8001);
    let mut kinds = [-1; 3];
    for (chip, kind) in kinds.iter_mut().enumerate() {
        let chip = i32::try_from(chip).unwrap();
        assert_eq!(sim.dcmi_get_topo_info_by_device_id(0, 0, chip / 2, chip % 2, kind), 0);
    }
    assert_eq!(kinds, [0, 6, 3], "self, SIO, HCCS");
    let mut pcie = [0; 16];
    assert_eq!(sim.dcmi_get_device_pcie_info_v2(1, 0, &raw mut pcie), 0);
    assert_eq!(pcie[..7], [0x19e5, 0x19e5, 0xd802, 0x3004, 0, 0x12, 0]);
    let mut version = [0; 32];
    assert_eq!(sim.dcmi_get_driver_version(version.as_mut_ptr(), 4), -8001);
    assert_eq!(sim.dcmi_get_driver_version(version.as_mut_ptr(), 32), 0);
    assert_eq!(version.map(|c| c.to_ne_bytes()[0])[..9], *b"24.1.rc3\0");
}

#[test]
fn processes_are_the_configured_and_our_own() {
    let sim = Sim::ready(&[("PROCESSES", "1=4321:1G")]);
    assert_eq!(sim.dcmi_init(), 0);
    let (mut list, mut count) = ([ProcMem::default(); 32], -1);
    assert_eq!(sim.dcmi_get_device_resource_info(1, 0, &raw mut list, &raw mut count), 0);
    assert_eq!((count, list[0]), (1, ProcMem { pid: 4321, bytes: 1 << 30 }));
    assert_eq!(sim.dcmi_get_device_resource_info(0, 0, &raw mut list, &raw mut count), 0);
    let own = i32::try_from(std::process::id()).unwrap();
    assert_eq!((count, list[0].pid), (1, own));
    assert_eq!(sim.aclrtResetDevice(0), 0);
    assert_eq!(sim.dcmi_get_device_resource_info(0, 0, &raw mut list, &raw mut count), 0);
    assert_eq!(count, 0);
}

#[test]
fn second_generation_of_names_is_by_logic_id_and_for_newer_chips() {
    let settings = [
        ("DEVICES", "3"),
        ("PHY", "4,1,6"),
        ("SOC", "Ascend950PR"),
        ("HEALTH", "6=3"),
        ("UTILIZATION", "6=12"),
        ("PROCESSES", "6=77:2M"),
        ("HBM", "16G"),
        ("HBM_USED", "1G"),
    ];
    let sim = Sim::new(&settings);
    let (mut device, mut health) = (0, 9);
    assert_eq!(sim.dcmiv2_get_device_health(2, &raw mut health), -8012);
    assert_eq!((sim.dcmi_init(), sim.dcmiv2_init()), (0, 0));
    assert_eq!(sim.dcmi_get_device_health(0, 0, &raw mut health), -8255);
    assert_eq!(sim.dcmiv2_get_dev_id_by_chip_phy_id(6, &raw mut device), 0);
    assert_eq!(device, 2);
    assert_eq!(sim.dcmiv2_get_dev_id_by_chip_phy_id(5, &raw mut device), -8008);
    assert_eq!(sim.dcmiv2_get_device_health(2, &raw mut health), 0);
    assert_eq!(health, 3);
    assert_eq!(sim.dcmiv2_get_device_health(3, &raw mut health), -8008);
    let mut percent = 0;
    assert_eq!(sim.dcmiv2_get_device_utilization_rate(2, 2, &raw mut percent), 0);
    assert_eq!(percent, 12);
    let (mut list, mut count) = ([ProcMem::default(); 32], -1);
    assert_eq!(sim.dcmiv2_get_device_proc_mem_info(2, &raw mut list, &raw mut count), 0);
    assert_eq!((count, list[0]), (1, ProcMem { pid: 77, bytes: 2 << 20 }));
    let (mut devices, mut found) = ([-1; 64], 0);
    assert_eq!(sim.dcmiv2_get_device_list(devices.as_mut_ptr(), &raw mut found, 64), 0);
    assert_eq!((found, &devices[..3]), (3, &[0, 1, 2][..]));

    let older = Sim::new(&[]);
    assert_eq!((older.dcmi_init(), older.dcmiv2_init()), (0, 0));
    assert_eq!(older.dcmiv2_get_device_health(0, &raw mut health), -8255);
    assert_eq!(older.dcmi_get_device_health(0, 0, &raw mut health), 0);
}
