;; section wayhouse.abi 00000100
;; Grows a table for ever.
(module
  (memory (export "memory") 1)
  (func (export "alloc") (param i32) (result i32) (i32.const 1024))
  (table 1 funcref)
  (func (export "sniff") (param i32 i32 i32 i32) (result i64)
    (loop $l (drop (table.grow 0 (ref.null func) (i32.const 1000))) (br $l))
    (i64.const 0))
)
