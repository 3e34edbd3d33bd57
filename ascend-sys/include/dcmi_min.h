/*
 * The part of the device management interface (DCMI) that cluster-health uses.
 *
 * Names, types, values and layouts are facts of the binary interface; this text is our own.
 * The generated bindings in ../src come from here, and tests/abi compares both with the headers
 * of the vendor.
 *
 * Everything but functions stands under ASCEND_SYS_HAVE_<name>: when build.rs (feature `bindgen`)
 * reads the vendor's headers first, it defines that for each name they already declare, and this
 * file adds only what that release lacks. Functions may be declared twice; a declaration that
 * differs is an error of the compiler.
 */
#ifndef ASCEND_SYS_DCMI_MIN_H
#define ASCEND_SYS_DCMI_MIN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A device is named by its card and its chip on the card, not by the number ACL gives it. */

#ifndef ASCEND_SYS_HAVE_dcmi_pcie_info_all
struct dcmi_pcie_info_all {
    unsigned int venderid;
    unsigned int subvenderid;
    unsigned int deviceid;
    unsigned int subdeviceid;
    int domain;
    unsigned int bdf_busid;
    unsigned int bdf_deviceid;
    unsigned int bdf_funcid;
    unsigned char reserve[32];
};
#endif

/* Memory in MB, frequency in MHz, rate in percent. */
#ifndef ASCEND_SYS_HAVE_dcmi_hbm_info
struct dcmi_hbm_info {
    unsigned long long memory_size;
    unsigned int freq;
    unsigned long long memory_usage;
    int temp;
    unsigned int bandwith_util_rate;
};
#endif

#ifndef ASCEND_SYS_HAVE_dcmi_proc_mem_info
struct dcmi_proc_mem_info {
    int proc_id;
    unsigned long proc_mem_usage;
};
#endif

/* Kinds of dcmi_get_device_utilization_rate. */
#ifndef ASCEND_SYS_HAVE_DCMI_UTILIZATION_RATE_AICORE
#define DCMI_UTILIZATION_RATE_AICORE 2
#endif
#ifndef ASCEND_SYS_HAVE_DCMI_UTILIZATION_RATE_AICPU
#define DCMI_UTILIZATION_RATE_AICPU 3
#endif
#ifndef ASCEND_SYS_HAVE_DCMI_UTILIZATION_RATE_CTRLCPU
#define DCMI_UTILIZATION_RATE_CTRLCPU 4
#endif
#ifndef ASCEND_SYS_HAVE_DCMI_UTILIZATION_RATE_HBM
#define DCMI_UTILIZATION_RATE_HBM 6
#endif
#ifndef ASCEND_SYS_HAVE_DCMI_UTILIZATION_RATE_HBM_BANDWIDTH
#define DCMI_UTILIZATION_RATE_HBM_BANDWIDTH 10
#endif
#ifndef ASCEND_SYS_HAVE_DCMI_UTILIZATION_RATE_VECTORCORE
#define DCMI_UTILIZATION_RATE_VECTORCORE 12
#endif
#ifndef ASCEND_SYS_HAVE_DCMI_UTILIZATION_RATE_NPU
#define DCMI_UTILIZATION_RATE_NPU 13
#endif

/* Answers of dcmi_get_topo_info_by_device_id. */
#ifndef ASCEND_SYS_HAVE_DCMI_TOPO_TYPE_SELF
#define DCMI_TOPO_TYPE_SELF 0
#endif
#ifndef ASCEND_SYS_HAVE_DCMI_TOPO_TYPE_SYS
#define DCMI_TOPO_TYPE_SYS 1
#endif
#ifndef ASCEND_SYS_HAVE_DCMI_TOPO_TYPE_PHB
#define DCMI_TOPO_TYPE_PHB 2
#endif
#ifndef ASCEND_SYS_HAVE_DCMI_TOPO_TYPE_HCCS
#define DCMI_TOPO_TYPE_HCCS 3
#endif
#ifndef ASCEND_SYS_HAVE_DCMI_TOPO_TYPE_PXB
#define DCMI_TOPO_TYPE_PXB 4
#endif
#ifndef ASCEND_SYS_HAVE_DCMI_TOPO_TYPE_PIX
#define DCMI_TOPO_TYPE_PIX 5
#endif
#ifndef ASCEND_SYS_HAVE_DCMI_TOPO_TYPE_SIO
#define DCMI_TOPO_TYPE_SIO 6
#endif
#ifndef ASCEND_SYS_HAVE_DCMI_TOPO_TYPE_HCCS_SW
#define DCMI_TOPO_TYPE_HCCS_SW 7
#endif
#ifndef ASCEND_SYS_HAVE_DCMI_TOPO_TYPE_UB
#define DCMI_TOPO_TYPE_UB 8
#endif

int dcmi_init(void);
int dcmi_get_driver_version(char *driver_ver, unsigned int len);
int dcmi_get_card_list(int *card_num, int *card_list, int list_len);
int dcmi_get_device_num_in_card(int card_id, int *device_num);
int dcmi_get_device_health(int card_id, int device_id, unsigned int *health);
int dcmi_get_device_errorcode_v2(int card_id, int device_id, int *error_count,
    unsigned int *error_code_list, unsigned int list_len);
int dcmi_get_device_pcie_info_v2(int card_id, int device_id, struct dcmi_pcie_info_all *pcie_info);
int dcmi_get_device_hbm_info(int card_id, int device_id, struct dcmi_hbm_info *hbm_info);
int dcmi_get_device_utilization_rate(int card_id, int device_id, int input_type,
    unsigned int *utilization_rate);
int dcmi_get_device_resource_info(int card_id, int device_id, struct dcmi_proc_mem_info *proc_info,
    int *proc_num);
int dcmi_get_topo_info_by_device_id(int card_id1, int device_id1, int card_id2, int device_id2,
    int *topo_type);
int dcmi_get_device_temperature(int card_id, int device_id, int *temperature);
int dcmi_get_device_power_info(int card_id, int device_id, int *power);
int dcmi_get_device_logic_id(int *device_logic_id, int card_id, int device_id);
int dcmi_get_device_phyid_from_logicid(unsigned int logicid, unsigned int *phyid);
int dcmi_get_device_logicid_from_phyid(unsigned int phyid, unsigned int *logicid);
int dcmi_get_card_id_device_id_from_logicid(int *card_id, int *device_id,
    unsigned int device_logic_id);
int dcmi_get_card_id_device_id_from_phyid(int *card_id, int *device_id, unsigned int device_phy_id);

/* The same of newer drivers, which name a device by its logic id; on chips before the 950 they are
 * there too, and answer that they are not supported. The physical id of a device has two names. */
int dcmiv2_init(void);
int dcmiv2_get_driver_version(char *driver_ver, unsigned int len);
int dcmiv2_get_device_list(int *device_list, int *device_count, int list_len);
int dcmiv2_get_device_health(int dev_id, unsigned int *health);
int dcmiv2_get_device_hbm_info(int dev_id, struct dcmi_hbm_info *hbm_info);
int dcmiv2_get_device_utilization_rate(int dev_id, int input_type, unsigned int *utilization_rate);
int dcmiv2_get_device_proc_mem_info(int dev_id, struct dcmi_proc_mem_info *proc_info, int *proc_num);
int dcmiv2_get_dev_id_by_chip_phy_id(unsigned int phyid, unsigned int *dev_id);
int dcmiv2_get_dev_id_from_chip_phyid(unsigned int phyid, unsigned int *dev_id);

#ifdef __cplusplus
}
#endif

#endif
