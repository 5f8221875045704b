;; section wayhouse.abi 00000100
;; Two functions that call each other for ever, one of them through a table.
(module
  (memory (export "memory") 1)
  (func (export "alloc") (param i32) (result i32) (i32.const 1024))
  (table 1 funcref)
  (elem (i32.const 0) $a)
  (type $t (func (result i64)))
  (func $a (result i64) (call $b))
  (func $b (result i64) (call_indirect (type $t) (i32.const 0)))
  (func (export "sniff") (param i32 i32 i32 i32) (result i64) (call $a))
)
