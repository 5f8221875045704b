;; section wayhouse.abi 00000100
;; Its initial table is larger than any may be.
(module
  (memory (export "memory") 1)
  (func (export "alloc") (param i32) (result i32) (i32.const 1024))
  (table 100000 funcref)
  (func (export "sniff") (param i32 i32 i32 i32) (result i64) (i64.const 0))
)
