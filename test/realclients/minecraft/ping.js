// A Minecraft client that asks for the server's status and prints what it calls
// itself: ping.js HOST PORT
const mc = require('minecraft-protocol')
const [host, port] = process.argv.slice(2)
mc.ping({ host, port: Number(port), version: '1.20.4', noPongTimeout: 20000, closeTimeout: 20000 }, (err, status) => {
  if (err) {
    console.error(err)
    process.exit(1)
  }
  console.log(typeof status.description === 'string' ? status.description : status.description.text)
  process.exit(0)
})
