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
