;; section wayhouse.abi 00000100
;; Grows its memory for ever.
(module
  (memory (export "memory") 1)
  (func (export "alloc") (param i32) (result i32) (i32.const 1024))
  (func (export "sniff") (param i32 i32 i32 i32) (result i64)
    (loop $l (drop (memory.grow (i32.const 1))) (br $l))
    (i64.const 0))
)
