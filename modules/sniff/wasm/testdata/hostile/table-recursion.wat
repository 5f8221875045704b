;; section wayhouse.abi 00000100
;; Calls itself for ever through a table.
(module
  (memory (export "memory") 1)
  (func (export "alloc") (param i32) (result i32) (i32.const 1024))
  (table 1 funcref)
  (elem (i32.const 0) $f)
  (type $t (func (param i32 i32 i32 i32) (result i64)))
  (func $f (export "sniff") (param i32 i32 i32 i32) (result i64)
    (call_indirect (type $t) (local.get 0) (local.get 1) (local.get 2) (local.get 3) (i32.const 0)))
)
