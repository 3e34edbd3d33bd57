//! Members of this package are its benches; the library target is empty.
