;; section wayhouse.abi 00000100
;; Gives its input back as the hint.
(module
  (memory (export "memory") 2)
  (func (export "alloc") (param i32) (result i32) (i32.const 1024))
  (func (export "sniff") (param $in i32) (param $n i32) (param i32 i32) (result i64)
    (i64.or
      (i64.shl (i64.extend_i32_u (local.get $in)) (i64.const 32))
      (i64.extend_i32_u (local.get $n))))
)
