//! CPU sets, verified binding and the census of bindable CPUs.
