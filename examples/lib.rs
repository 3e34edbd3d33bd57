//! Members of this package are its examples; the library target is empty.
