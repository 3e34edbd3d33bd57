//! Members of this package are its tests; the library target is empty.
