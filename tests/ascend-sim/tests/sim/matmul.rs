//! The two-phase matrix product.

use std::ptr;

use crate::library::{Ptr, Sim};

fn tensor(sim: &Sim, dims: [i64; 2], strides: [i64; 2], kind: i32, data: Ptr) -> Ptr {
    let elements = [dims[0] * dims[1]];
    let made = sim.aclCreateTensor(
        dims.as_ptr(),
        2,
        kind,
        strides.as_ptr(),
        0,
        2,
        elements.as_ptr(),
        1,
        data,
    );
    assert!(!made.is_null());
    made
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

#[test]
fn the_product_is_right_and_an_executor_is_for_one_run() {
    let sim = Sim::ready(&[]);
    let stream = sim.stream();
    // (1 2 3; 4 5 6) times the transpose of (1 0 2; 0 1 1), which is stored as it is shown.
    let a = sim.upload(&floats(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]));
    let b = sim.upload(&floats(&[1.0, 0.0, 2.0, 0.0, 1.0, 1.0]));
    let c = sim.malloc(16);
    let (ta, tb, tc) = (
        tensor(&sim, [2, 3], [3, 1], 0, a),
        tensor(&sim, [3, 2], [1, 3], 0, b),
        tensor(&sim, [2, 2], [2, 1], 0, c),
    );
    let (mut size, mut executor) = (0, ptr::null_mut());
    let plan = |a, b, out, executor: &mut Ptr, size: &mut u64| {
        sim.aclnnMatmulGetWorkspaceSize(a, b, out, 0, size, executor)
    };
    assert_eq!(plan(ta, ptr::null_mut(), tc, &mut executor, &mut size), 161_001);
    assert_eq!(plan(ta, ta, tc, &mut executor, &mut size), 161_002, "shapes");
    assert_eq!(plan(ta, tb, tc, &mut executor, &mut size), 0, "{}", sim.message());
    let workspace = sim.malloc(usize::try_from(size).unwrap());
    assert_eq!(sim.aclnnMatmul(workspace, size - 1, executor, stream), 161_002);
    assert_eq!(sim.aclnnMatmul(workspace, size, executor, stream), 0);
    assert_eq!(sim.aclrtSynchronizeStream(stream), 0);
    assert_eq!(sim.download(c, 16), floats(&[7.0, 5.0, 16.0, 11.0]));
    assert_eq!(sim.aclnnMatmul(workspace, size, executor, stream), 161_002, "used up");

    assert_eq!(plan(ta, tb, tc, &mut executor, &mut size), 0);
    assert_eq!(sim.aclSetAclOpExecutorRepeatable(executor), 0);
    for _ in 0..3 {
        assert_eq!(sim.aclnnMatmul(workspace, size, executor, stream), 0);
    }
    assert_eq!(sim.aclrtSynchronizeStream(stream), 0);
    assert_eq!(sim.aclDestroyAclOpExecutor(executor), 0);
    for tensor in [ta, tb, tc] {
        assert_eq!(sim.aclDestroyTensor(tensor), 0);
    }
    assert_eq!((sim.count("tensors"), sim.count("executors")), (0, 0));
}

#[test]
fn halves_and_brain_floats_are_numbers_too() {
    // Bit patterns from the definitions of the formats: 1.5, -2, and the product -3.
    for (kind, x, y, product) in
        [(1, 0x3e00_u16, 0xc000_u16, 0xc200_u16), (27, 0x3fc0, 0xc000, 0xc040)]
    {
        let sim = Sim::ready(&[("WORKSPACE", "0")]);
        let stream = sim.stream();
        let (a, b) = (sim.upload(&x.to_le_bytes()), sim.upload(&y.to_le_bytes()));
        let c = sim.malloc(2);
        let one = |data| tensor(&sim, [1, 1], [1, 1], kind, data);
        let (mut size, mut executor) = (1, ptr::null_mut());
        let (ta, tb, tc) = (one(a), one(b), one(c));
        let planned =
            sim.aclnnMatmulGetWorkspaceSize(ta, tb, tc, 0, &raw mut size, &raw mut executor);
        assert_eq!((planned, size), (0, 0));
        assert_eq!(sim.aclnnMatmul(ptr::null_mut(), 0, executor, stream), 0);
        assert_eq!(sim.aclrtSynchronizeStream(stream), 0);
        assert_eq!(sim.download(c, 2), product.to_le_bytes());
    }
}
