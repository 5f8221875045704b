;; section wayhouse.abi 00000100
;; Looks for what the call before it has left: writes to all of its memory and its table.
(module
  (memory (export "memory") 1)
  (func (export "alloc") (param i32) (result i32) (i32.const 1024))
  (table 2 funcref)
  (global $g (mut i32) (i32.const 0))
  (elem declare func $f)
  (func $f)
  (func (export "sniff") (param i32 i32 i32 i32) (result i64)
    (local $p i32)
    (if (i32.or (global.get $g) (i32.or (i32.eqz (ref.is_null (table.get 0 (i32.const 1)))) (i32.load (i32.const 8192))))
      (then (unreachable)))
    (drop (memory.grow (i32.const 100)))
    (local.set $p (i32.const 8192))
    (loop $l
      (if (i32.load (local.get $p)) (then (unreachable)))
      (i32.store (local.get $p) (i32.const -1))
      (local.set $p (i32.add (local.get $p) (i32.const 4)))
      (br_if $l (i32.lt_u (local.get $p) (i32.const 6619136))))
    (global.set $g (i32.const 1))
    (table.set 0 (i32.const 1) (ref.func $f))
    (i64.const 0))
)
